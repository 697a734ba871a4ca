"""Make a trained model's checkpoint, with its tokenizer and chat template, of its gguf file.

python trained_model.py GGUF FOLDER, with the engine's own interpreter. The file is the one of the
package in ``build.TRAINED``: a Llama of 135 million weights with a byte-level BPE tokenizer.
"""

import sys
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

TYPE = torch.bfloat16


def main() -> None:
    """Write the checkpoint."""
    source, folder = map(Path, sys.argv[1:])
    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name, dtype=TYPE)
    tokenizer = AutoTokenizer.from_pretrained(
        source.parent, gguf_file=source.name, model_max_length=config.max_position_embeddings
    )
    # "tokenizer.ggml.pre" of the file is smollm, which transformers does not follow.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.save_pretrained(folder)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    # ``from_pretrained`` would need accelerate to load them.
    read = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model)["tensors"]
    weights = {name: tensor.to(TYPE) for name, tensor in read.items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    # Refuses weights that are missing, unknown or of another shape.
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    model.save_pretrained(folder)


if __name__ == "__main__":
    main()
