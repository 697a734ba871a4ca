"""Make a trained model's checkpoint, with its tokenizer and chat template, of its gguf file.

python trained_model.py GGUF FOLDER, with the engine's own interpreter. The file is the one of the
package in ``build.TRAINED``: a Llama of 135 million weights with a byte-level BPE tokenizer.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, TokenType, dequantize
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TYPE = torch.bfloat16
# Modules of a layer, by their names in gguf files.
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class Gguf:
    """One file: metadata by key, and the model that they describe."""

    def __init__(self, file: Path) -> None:
        self._reader = GGUFReader(file)

    def __getitem__(self, key: str) -> Any:
        return self._reader.fields[key].contents()

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """From the file's own vocabulary and merges."""
        if self["tokenizer.ggml.pre"] != "smollm":
            raise ValueError(f"tokenizer {self['tokenizer.ggml.pre']!r}: only smollm is known")
        tokens: list[str] = self["tokenizer.ggml.tokens"]
        kinds: list[int] = self["tokenizer.ggml.token_type"]
        merges = [tuple(merge.split(" ")) for merge in self["tokenizer.ggml.merges"]]
        vocabulary = {token: index for index, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        of_kinds = zip(tokens, kinds, strict=True)
        special = [token for token, kind in of_kinds if kind == TokenType.CONTROL]
        tokenizer.add_special_tokens(special)
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            chat_template=self["tokenizer.chat_template"],
            model_max_length=self["llama.context_length"],
            **{
                f"{name}_token": tokens[self[f"tokenizer.ggml.{key}_token_id"]]
                for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
            },
        )

    def config(self) -> LlamaConfig:
        """Of ``LlamaForCausalLM``."""
        return LlamaConfig(
            vocab_size=self["llama.vocab_size"],
            hidden_size=self["llama.embedding_length"],
            intermediate_size=self["llama.feed_forward_length"],
            num_hidden_layers=self["llama.block_count"],
            num_attention_heads=self["llama.attention.head_count"],
            num_key_value_heads=self["llama.attention.head_count_kv"],
            max_position_embeddings=self["llama.context_length"],
            rms_norm_eps=self["llama.attention.layer_norm_rms_epsilon"],
            rope_parameters={"rope_type": "default", "rope_theta": self["llama.rope.freq_base"]},
            tie_word_embeddings=True,
            bos_token_id=self["tokenizer.ggml.bos_token_id"],
            eos_token_id=self["tokenizer.ggml.eos_token_id"],
            pad_token_id=self["tokenizer.ggml.padding_token_id"],
            dtype=TYPE,
        )

    def model(self) -> LlamaForCausalLM:
        """With the weights that the quantized ones stand for."""
        config = self.config()
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        weights = {}
        for tensor in self._reader.tensors:
            values = dequantize(tensor.data, tensor.tensor_type)
            part = tensor.name.split(".")[-2]
            if part in heads:
                values = in_halves(values, heads[part])
            weights[module_name(tensor.name)] = torch.tensor(values, dtype=TYPE)
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        # Refuses weights that are missing, unknown or of another shape.
        model.load_state_dict(weights, assign=True)
        model.tie_weights()
        return model


def module_name(name: str) -> str:
    """Of a tensor's gguf name, such as ``blk.3.attn_q.weight``."""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{LAYER[parts[2]]}.{parts[3]}"
    return {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[parts[0]] + ".weight"


def in_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Projections of a rotary attention, each head's even rows before its odd ones.

    The two numbers that one angle turns are neighbours in gguf, and half a head apart in
    transformers.
    """
    pairs = rows.reshape(heads, -1, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def main() -> None:
    """Write the checkpoint."""
    source, folder = map(Path, sys.argv[1:])
    gguf = Gguf(source)
    gguf.tokenizer().save_pretrained(folder)
    gguf.model().save_pretrained(folder)


if __name__ == "__main__":
    main()
