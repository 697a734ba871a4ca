"""Numbers of a model out of its config.json, beside what is published of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from loadgen.planner.model_files import ModelNumbers, read_model
from router.core.errors import InputError

LLAMA_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
BLOOM = {
    "model_type": "bloom",
    "n_embed": 14336,
    "n_layer": 70,
    "n_head": 112,
    "vocab_size": 250880,
    "tie_word_embeddings": True,
}
MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "num_hidden_layers": 61,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "quantization_config": {"quant_method": "fp8"},
}
FALCON_7B = {
    "model_type": "falcon",
    "hidden_size": 4544,
    "num_attention_heads": 71,
    "num_hidden_layers": 32,
    "num_kv_heads": 71,
    "multi_query": True,
    "new_decoder_architecture": False,
    "vocab_size": 65024,
    "tie_word_embeddings": True,
}

DBRX = {
    "model_type": "dbrx",
    "d_model": 6144,
    "n_heads": 48,
    "n_layers": 40,
    "attn_config": {"kv_n_heads": 8},
    "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
    "vocab_size": 100352,
}


def read(tmp_path: Path, config: object, **given: Any) -> ModelNumbers:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return read_model(tmp_path, **given)


def every_parameter(model: ModelNumbers, bits: float = 16) -> float:
    ends = model.end_bytes(first=True, last=True) / 2
    return model.blocks * model.block_bytes * 8 / bits + ends


@pytest.mark.parametrize(
    ("config", "published", "bits"),
    [
        pytest.param(LLAMA_70B, 70.55e9, 16, id="grouped heads"),
        pytest.param(BLOOM, 176.2e9, 16, id="multi-head, tied"),
        pytest.param(MIXTRAL, 46.7e9, 16, id="experts"),
        pytest.param(DBRX, 131.6e9, 16, id="parts told apart"),
        pytest.param(FALCON_7B, 7.0e9, 16, id="one head of keys"),
        # Three of its layers are dense, and count as the others do.
        pytest.param(DEEPSEEK_V3, 671e9 * 61 / 58, 8, id="latent attention, experts, 8 bits"),
    ],
)
def test_parameters_are_those_published(
    tmp_path: Path, config: dict[str, Any], published: float, bits: float
) -> None:
    assert every_parameter(read(tmp_path, config), bits) == pytest.approx(published, rel=0.015)


def test_only_the_experts_that_a_token_uses_compute_and_are_read(tmp_path: Path) -> None:
    mixtral = read(tmp_path, MIXTRAL)

    active = mixtral.blocks * mixtral.read_bytes / 2 + mixtral.end_bytes(True, True) / 2
    assert active == pytest.approx(12.9e9, rel=0.01)
    assert mixtral.flops_per_token == mixtral.read_bytes


def test_kv_of_a_token(tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA_70B).kv_bytes_per_token == 2 * 8 * 128 * 2
    assert read(tmp_path, LLAMA_70B, kv_cache_dtype="fp8").kv_bytes_per_token == 2 * 8 * 128
    assert read(tmp_path, LLAMA_70B | {"head_dim": 64}).kv_bytes_per_token == 2 * 8 * 64 * 2
    assert read(tmp_path, BLOOM).kv_bytes_per_token == 2 * 14336 * 2
    assert read(tmp_path, DEEPSEEK_V3).kv_bytes_per_token == (512 + 64) * 2
    assert read(tmp_path, FALCON_7B).kv_bytes_per_token == 2 * 64 * 2
    falcon_40b = FALCON_7B | {"new_decoder_architecture": True, "num_kv_heads": 8}
    assert read(tmp_path, falcon_40b).kv_bytes_per_token == 2 * 8 * 64 * 2
    assert read(tmp_path, DBRX).kv_bytes_per_token == 2 * 8 * 128 * 2


def test_bloom_is_the_papers(tmp_path: Path) -> None:
    """1.32 GB a block in 4 bits, 5 GFLOP a token, .116 GB for 2,020 tokens."""
    double = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_use_double_quant": True,
    }
    bloom = read(tmp_path, BLOOM | {"quantization_config": double})

    assert bloom.block_bytes == pytest.approx(1.32e9, rel=0.04)
    assert bloom.flops_per_token == pytest.approx(5e9, rel=0.02)
    assert 2020 * bloom.kv_bytes_per_token == pytest.approx(0.116e9, rel=0.01)


@pytest.mark.parametrize(
    ("how", "bits"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8),
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "mxfp4"}, 4.25),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 8),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8}}},
            },
            8,
        ),
    ],
)
def test_quantized_weights(tmp_path: Path, how: dict[str, Any], bits: float) -> None:
    full = read(tmp_path, LLAMA_70B)
    small = read(tmp_path, LLAMA_70B | {"quantization_config": how})

    assert small.block_bytes == pytest.approx(full.block_bytes * bits / 16)
    assert small.first_bytes == full.first_bytes
    assert read(tmp_path, LLAMA_70B, weight_bits=bits).block_bytes == small.block_bytes


def test_what_reads_of_a_model_that_also_sees(tmp_path: Path) -> None:
    inside = {"model_type": "gemma3", "text_config": LLAMA_70B, "vision_config": {"hidden_size": 1}}

    assert read(tmp_path, inside) == read(tmp_path, LLAMA_70B)


def test_ends_that_are_one_matrix_are_needed_once_in_one_place(tmp_path: Path) -> None:
    tied, apart = read(tmp_path, BLOOM), read(tmp_path, LLAMA_70B)

    assert tied.end_bytes(True, True) == tied.first_bytes
    assert apart.end_bytes(True, True) == 2 * apart.first_bytes
    assert (tied.end_bytes(False, True), tied.end_bytes(False, False)) == (tied.last_bytes, 0)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"model_type": "mamba2"}, "layers without a growing KV cache"),
        (
            LLAMA_70B | {"layer_types": ["linear_attention", "full_attention"]},
            "layers without a growing KV cache",
        ),
        ({"model_type": "llama"}, "hidden_size is missing"),
        (LLAMA_70B | {"num_attention_heads": 0.5}, "num_attention_heads is 0.5, not a whole"),
        (LLAMA_70B | {"quantization_config": {"quant_method": "new"}}, "not known (new)"),
        (["no object"], "is not a model's config.json"),
        (LLAMA_70B | {"linear_num_key_heads": 16}, "layers without a growing KV cache"),
        (LLAMA_70B | {"layer_types": ["conv"]}, "layers without a growing KV cache"),
        (LLAMA_70B | {"attn_type_list": [0, 1]}, "layers without a growing KV cache"),
        (LLAMA_70B | {"block_configs": [{}]}, "layers that differ in size"),
        (LLAMA_70B | {"intermediate_size": [8, 9]}, "intermediate_size is [8, 9], not a whole"),
        (LLAMA_70B | {"num_key_value_heads": "8"}, "num_key_value_heads is '8', not a whole"),
        (LLAMA_70B | {"num_experts": -8}, "num_experts is -8, not a whole"),
        (LLAMA_70B | {"max_position_embeddings": 1e5}, "is 100000.0, not a whole"),
        (LLAMA_70B | {"num_hidden_layers": 10**6}, "has 1,000,000 layers, more than 10,000"),
        (LLAMA_70B | {"text_config": [1]}, "text_config is [1], not an object"),
        (LLAMA_70B | {"quantization_config": "fp8"}, "is 'fp8', not an object"),
        (LLAMA_70B | {"quantization_config": {"bits": 4, "group_size": "1"}}, "not known"),
    ],
)
def test_what_it_cannot_use_is_said(tmp_path: Path, config: object, told: str) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, config)
    assert told in str(caught.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*config\.json: No such file"):
        read_model(tmp_path)
    for text in ("{", "[" * 100_000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(InputError, match="is not JSON"):
            read_model(tmp_path / "config.json")
