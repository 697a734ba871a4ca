"""A LoRA adapter for a checkpoint, as PEFT saves it; its weights are zeros."""

import json
import struct
from pathlib import Path

RANK = 8


def write_adapter(model: Path, folder: Path) -> Path:
    """Write one for the query projections of a Llama checkpoint into a new folder."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "bias": "none"}))
    sizes = json.loads((model / "config.json").read_text())
    inputs, outputs = sizes["hidden_size"], sizes["num_attention_heads"] * sizes["head_dim"]
    tensors: dict[str, dict[str, object]] = {}
    end = 0
    for layer in range(sizes["num_hidden_layers"]):
        for part, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
            name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{part}.weight"
            begin, end = end, end + 4 * shape[0] * shape[1]
            tensors[name] = {"dtype": "F32", "shape": shape, "data_offsets": (begin, end)}
    head = json.dumps(tensors).encode()
    weights = struct.pack("<Q", len(head)) + head + bytes(end)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder
