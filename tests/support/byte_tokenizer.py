"""A model's folder with a tokenizer: one token a byte, and one that begins each prompt."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

BEGIN = "<|begin|>"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "[{{ message.role }}]{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments.x }}{% endfor %}"
    "{{ message.reasoning_content }}{{ message.name }}{{ message.tool_call_id }}"
    "{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{{ documents or '' }}{{ enable_thinking }}"
    "{% if add_generation_prompt %}{% generation %}[assistant]{% endgeneration %}{% endif %}"
)


def byte_tokenizer(folder: Path, template: str | None = TEMPLATE) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate((BEGIN, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BEGIN])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, 0)]
    )
    tokenizer.enable_truncation(8)  # what a folder may have; engines do not go by it
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": {"content": BEGIN}, "add_bos_token": True, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
