"""A model's numbers for the planner, from its Hugging Face config.json.

Only weight matrices count; biases and norms are below a thousandth. Where layers differ (a few
dense ones before experts), all count as the larger kind. Vision and audio parts do not count.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from router.config.given_files import read_json
from router.core.errors import InputError

# Feed-forward parts with two matrices; others have three, with a gate.
_UNGATED = re.compile(
    "bloom|bigcode|codegen|falcon|gpt2|gpt_bigcode|gpt_neo|gpt_neox|gptj|mpt|nemotron|opt|phi|"
    "starcoder2"
)
# State that does not grow with the tokens, or KV in some layers only.
_NO_KV = re.compile(
    "mamba|rwkv|ssm|recurrent|linear_attention|linear_attn|linear_num_key_heads|conv_l_cache|'conv'"
)
MAX_BLOCKS = 10_000
# Far above any model's numbers, tokens included.
_MOST = 10**9
# Keys of models whose layers differ in size.
_UNLIKE = ("block_configs", "num_key_value_heads_per_layer")


@dataclass(frozen=True, slots=True)
class ModelNumbers:
    """A model as a row of equal blocks."""

    blocks: int
    block_bytes: int
    read_bytes: int  # weights of a block that a single token needs; fewer with experts
    flops_per_token: float  # operations of a block per token
    kv_bytes_per_token: float  # KV of a block per token
    hidden_bytes: int  # activations of a token between blocks
    first_bytes: int  # embeddings, stored with the first block
    last_bytes: int  # output layer, stored with the last block
    tied: bool = False  # whether these two are the same; a server with both ends stores them once
    max_tokens: int | None = None  # longest supported context; None: not given

    def end_bytes(self, first: bool, last: bool) -> int:
        """Bytes that a server stores for the first block, the last one, or both."""
        if first and last and self.tied:
            return max(self.first_bytes, self.last_bytes)
        return first * self.first_bytes + last * self.last_bytes


def read_model(
    path: Path, weight_bits: float | None = None, kv_cache_dtype: str = "auto"
) -> ModelNumbers:
    """Read a config.json, or the one in a folder; InputError names the keys to give instead.

    Args:
        path: file or folder.
        weight_bits: bits per weight of a block with scales; None: as in the file.
        kv_cache_dtype: ``auto`` (the type of the computation: 16 bits), or an 8-bit type.
    """
    file = path / "config.json" if path.is_dir() else path
    found = read_json(file, "model: ")
    if not isinstance(found, dict):
        raise InputError(f"model: {file} is not a model's config.json")
    return _Reader(found, str(file)).numbers(weight_bits, 1 if "8" in kv_cache_dtype else 2)


class _Reader:
    def __init__(self, config: Mapping[str, Any], file: str) -> None:
        self._outer = config
        self._file = file
        # Multimodal models nest the text model's config; some split it into parts.
        inner = self._table(config, "text_config") or config
        parts = [self._table(inner, name) for name in ("attn_config", "ffn_config")]
        self._config = {key: value for part in (*parts, inner) for key, value in part.items()}

    def numbers(self, weight_bits: float | None, kv_element_bytes: int) -> ModelNumbers:
        kind = " ".join([*self._config, str(self._get("model_type", default=""))]).lower()
        layers = str(self._get("layer_types", "layers_block_type", default=None))
        unlike = "0" in str(self._get("attn_type_list", default=None))
        if unlike or _NO_KV.search(f"{kind} {layers}"):
            raise self._wrong("has layers without a growing KV cache")
        if any(self._get(name, default=None) for name in _UNLIKE):
            raise self._wrong("has layers that differ in size")
        hidden = self._whole("hidden_size", "n_embd", "d_model", "n_embed")
        attention, kv_elements = self._attention(hidden)
        every, active = self._feed_forward(hidden)
        blocks = self._whole("num_hidden_layers", "n_layer", "num_layers", "n_layers")
        if blocks > MAX_BLOCKS:
            raise self._wrong(f"has {blocks:,} layers, more than {MAX_BLOCKS:,}")
        bits = weight_bits or self._bits()
        embedding = 2 * hidden * self._whole("vocab_size", "padded_vocab_size")
        names = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len")
        longest = self._some(*names)
        return ModelNumbers(
            blocks=blocks,
            block_bytes=round((attention + every) * bits / 8),
            read_bytes=round((attention + active) * bits / 8),
            flops_per_token=2.0 * (attention + active),
            kv_bytes_per_token=kv_elements * kv_element_bytes,
            hidden_bytes=2 * hidden,
            first_bytes=embedding,
            last_bytes=embedding,
            tied=bool(self._get("tie_word_embeddings", default=False)),
            max_tokens=longest or None,
        )

    def _attention(self, hidden: int) -> tuple[int, int]:
        """Weights of the attention, and elements of KV per token."""
        heads = self._whole("num_attention_heads", "n_head", "n_heads")
        latent = self._some("kv_lora_rank")
        if latent:
            # Multi-head latent attention: one compressed vector and one rotated key per token.
            rotated = self._whole("qk_rope_head_dim")
            plain = self._whole("qk_nope_head_dim")
            value = self._whole("v_head_dim")
            query_rank = self._some("q_lora_rank")
            query = heads * (plain + rotated)
            queries = query_rank * (hidden + query) if query_rank else hidden * query
            keys = hidden * (latent + rotated) + latent * heads * (plain + value)
            return queries + keys + heads * value * hidden, latent + rotated
        names = ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "multi_query_group_num")
        kv_heads = self._some(*names, "num_attention_groups") or heads
        # Falcon-7B also has a num_kv_heads, which applies to the later models only.
        newer = self._get("new_decoder_architecture", default=False)
        if self._get("multi_query", default=False) and not newer:
            kv_heads = 1
        size = self._some("head_dim", "kv_channels") or max(1, hidden // heads)
        return 2 * hidden * size * (heads + kv_heads), 2 * kv_heads * size

    def _feed_forward(self, hidden: int) -> tuple[int, int]:
        """Feed-forward weights: all, and those that one token needs."""
        matrices = 2 if _UNGATED.fullmatch(str(self._get("model_type", default=""))) else 3
        names = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
        inner = self._some(*names) or 4 * hidden
        names = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
        experts = self._some(*names)
        if experts <= 1:
            return matrices * hidden * inner, matrices * hidden * inner
        used = self._whole("num_experts_per_tok", "num_experts_per_token", "moe_top_k")
        inner = self._some("moe_intermediate_size") or inner
        shared = self._some("shared_expert_intermediate_size", "share_expert_dim")
        shared = shared or inner * self._some("n_shared_experts", "num_shared_experts")
        always = hidden * (experts + matrices * shared)
        each, used = matrices * hidden * inner, min(used, experts)
        return always + experts * each, always + used * each

    def _bits(self) -> float:
        how = self._table(self._outer, "quantization_config")
        how = how or self._table(self._config, "quantization_config")
        if not how:
            return 16
        method = str(how.get("quant_method", "")).lower()
        known = {"fp8": 8.0, "fbgemm_fp8": 8.0, "mxfp4": 4.25, "bitsandbytes": _bitsandbytes(how)}
        if method in known:
            return known[method]
        if method.startswith("modelopt"):
            return 4.5 if "FP4" in str(how.get("quant_algo", "")) else 8.0
        if method == "compressed-tensors":
            groups = self._table(how, "config_groups")
            how = self._table(self._table(groups, next(iter(groups), "")), "weights")
        bits = how.get("num_bits") or how.get("bits") or how.get("w_bit")
        group = how.get("group_size") or how.get("q_group_size") or 0
        if not (type(bits) is type(group) is int and 0 < bits <= 16):
            raise InputError(
                f"model: {self._file} is quantized in a way that is not known "
                f"({method or 'unnamed'}); give [model] weight_bits"
            )
        return bits + (16 + bits) / group if group > 0 else bits

    def _get(self, *names: str, default: Any) -> Any:
        return next((self._config[name] for name in names if name in self._config), default)

    def _whole(self, *names: str) -> int:
        if not (value := self._some(*names)):
            raise self._wrong(f"{names[0]} is missing")
        return value

    def _some(self, *names: str) -> int:
        name = next((name for name in names if self._config.get(name) is not None), names[0])
        value = self._config.get(name, 0) or 0
        if type(value) is not int or not 0 <= value <= _MOST:
            raise self._wrong(f"{name} is {value!r:.50}, not a whole number that makes sense")
        return value

    def _table(self, within: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        """Empty if there is none."""
        value = within.get(name) or {}
        if not isinstance(value, Mapping):
            raise self._wrong(f"{name} is {value!r:.50}, not an object")
        return value

    def _wrong(self, what: str) -> InputError:
        return InputError(
            f"model: {self._file} {what}; give [model] blocks, block_gb, kv_bytes_per_token and "
            "flops_per_token in place of config"
        )


def _bitsandbytes(how: Mapping[str, Any]) -> float:
    if not how.get("load_in_4bit") and not how.get("_load_in_4bit"):
        return 8.0
    # One 32-bit scale per 64 weights, or an 8-bit one whose own scales 256 share.
    return 4 + (8 / 64 + 32 / (64 * 256) if how.get("bnb_4bit_use_double_quant") else 32 / 64)
