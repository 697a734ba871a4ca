"""KV caches of well-known models, as vLLM itself forms them from the layers' specifications."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class KvModel:
    """A model's layers, and how the engine is started.

    Attributes:
        layers: specification of each layer, by its number.
        blocks: of the pool.
        block_tokens: ``--block-size``.
        context_ranks: ``--decode-context-parallel-size``.
        states: ``--mamba-cache-mode``.
        longest: ``--max-model-len``.
    """

    layers: Callable[[], list[Any]]
    blocks: int
    block_tokens: int = 16
    context_ranks: int = 1
    states: str = "none"
    longest: int = 131_072

    def adjust(self, config: Any) -> None:
        """Change an engine's configuration to the model's."""
        config.model_config.max_model_len = self.longest
        config.cache_config.block_size = self.block_tokens
        config.cache_config.mamba_cache_mode = self.states
        config.parallel_config.decode_context_parallel_size = self.context_ranks
        if hasattr(config.cache_config, "kv_cache_layout"):
            config.cache_config.kv_cache_layout = "LBNHC"

    def groups(self, config: Any) -> list[Any]:
        """KV groups, by vLLM's own rules."""
        try:
            from vllm.v1.core.kv_cache_planning import get_kv_cache_groups
        except ImportError:  # before 0.33
            from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
        from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

        register_all_kvcache_specs(config)
        layers = {f"layer.{number}": spec for number, spec in enumerate(self.layers())}
        groups: list[Any] = get_kv_cache_groups(config, layers)
        return groups


def _attention(block: int, heads: int, size: int, **window: int) -> Any:
    import torch
    from vllm.v1 import kv_cache_interface as interface

    kinds = {
        "sliding_window": interface.SlidingWindowSpec,
        "attention_chunk_size": interface.ChunkedLocalAttentionSpec,
    }
    kind = next((kinds[name] for name in window), interface.FullAttentionSpec)
    return kind(
        block_size=block, num_kv_heads=heads, head_size=size, dtype=torch.bfloat16, **window
    )


def _llama() -> list[Any]:
    """Llama 3.1 8B."""
    return [_attention(16, 8, 128) for _ in range(32)]


def _gemma() -> list[Any]:
    """Gemma 3 27B: five layers of six read the last 1,024 tokens."""
    full, sliding = _attention(16, 16, 128), _attention(16, 16, 128, sliding_window=1024)
    return [full if layer % 6 == 5 else sliding for layer in range(62)]


def _gpt_oss() -> list[Any]:
    """gpt-oss-20b: every other layer reads the last 128 tokens."""
    full, sliding = _attention(16, 8, 64), _attention(16, 8, 64, sliding_window=128)
    return [full if layer % 2 else sliding for layer in range(24)]


def _llama_4() -> list[Any]:
    """Llama 4 Scout: three layers of four read their own chunk of 8,192 tokens."""
    full, chunked = _attention(16, 8, 128), _attention(16, 8, 128, attention_chunk_size=8192)
    return [full if layer % 4 == 3 else chunked for layer in range(48)]


def _bamba(states: str, longest: int) -> list[Any]:
    """Bamba 9B: 29 layers of Mamba-2 and three of attention.

    vLLM makes the blocks of attention as large as a state.
    """
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    shapes = ((3, 8192 + 2 * 256), (128, 64, 256))
    dtypes = (torch.bfloat16, torch.bfloat16)
    state = sum(2 * rows * columns for rows, columns in ((3, 8704), (128 * 64, 256)))
    per_token = 2 * 8 * 128 * 2
    block = -(-state // (16 * per_token)) * 16
    mamba = MambaSpec(
        block_size=block if states == "align" else longest,
        shapes=shapes,
        dtypes=dtypes,
        page_size_padded=block * per_token,
        mamba_cache_mode=states,
    )
    full = _attention(block, 8, 128)
    return [full if layer in (9, 18, 27) else mamba for layer in range(32)]


def _deepseek() -> list[Any]:
    """DeepSeek-V3: one latent vector a token."""
    import torch
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    spec = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    return [spec] * 61


BAMBA_BLOCK = 1040

MODELS: Mapping[str, KvModel] = {
    "Llama 3.1 8B": KvModel(_llama, 30_000),
    "Gemma 3 27B": KvModel(_gemma, 43_000),
    "gpt-oss-20b": KvModel(_gpt_oss, 40_000),
    "Llama 4 Scout": KvModel(_llama_4, 40_000),
    "Bamba 9B": KvModel(lambda: _bamba("none", 131_072), 700, BAMBA_BLOCK),
    "Bamba 9B, cached": KvModel(lambda: _bamba("align", 131_072), 700, BAMBA_BLOCK, states="align"),
    "DeepSeek-V3, 8 context ranks": KvModel(_deepseek, 1_000, 64, context_ranks=8),
}
