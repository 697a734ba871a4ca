"""Make a tiny Mixtral checkpoint with random weights; the tokenizer is the tiny Llama's.

PYTHONPATH=. VENV/bin/python -m tests.support.moe_lockstep.model FOLDER
"""

from __future__ import annotations

import sys

import torch
from transformers import MixtralConfig, MixtralForCausalLM

from deploy.engine.tiny_model import SEED, byte_tokenizer


def random_mixtral(vocabulary: int) -> MixtralForCausalLM:
    """Two layers of four experts, two of them for each token, in bfloat16."""
    torch.manual_seed(SEED)
    config = MixtralConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=32768,
        sliding_window=None,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        dtype=torch.bfloat16,
    )
    return MixtralForCausalLM(config).to(torch.bfloat16)


def main() -> None:
    """Write the checkpoint."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(sys.argv[1])
    random_mixtral(len(tokenizer)).save_pretrained(sys.argv[1])


if __name__ == "__main__":
    main()
