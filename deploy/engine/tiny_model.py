"""Make a tiny Llama checkpoint with random weights, a tokenizer and a chat template.

python tiny_model.py FOLDER, with the engine's own interpreter. The same files come out every time.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEED = 2601
SPECIAL = ("<|begin|>", "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "<|{{ message.role }}|>{{ message.content }}<|end|>"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and the special ones; nothing is learnt, so nothing can vary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL[0],
        eos_token=SPECIAL[1],
        pad_token=SPECIAL[2],
        chat_template=CHAT_TEMPLATE,
    )


def random_llama(vocabulary: int) -> LlamaForCausalLM:
    """About a tenth of a million weights, in bfloat16."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=32768,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        # vLLM reads the type of the weights here
        dtype=torch.bfloat16,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def main() -> None:
    """Write the checkpoint."""
    folder = Path(sys.argv[1])
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    random_llama(len(tokenizer)).save_pretrained(folder)


if __name__ == "__main__":
    main()
