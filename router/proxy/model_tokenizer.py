"""Token ids of texts and chats as vLLM makes them of a model's folder (``--tokenizer``).

Only text is tokenized, and chats with the model's own template. What an engine may do otherwise
raises an error, and the caller goes by what it has learned of texts.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from router.core.errors import ConfigError

log = logging.getLogger(__name__)

Json = dict[str, Any]

# Templates mark answers for training by a tag that transformers adds; engines render what it has.
_ANSWERS = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
# A template that reads parts of messages gets parts from vLLM, any other one their texts.
_READS_PARTS = re.compile(r"\bin\s+(\w+\.content|\w+\[['\"]content['\"]\]|content)\b")
_ROLES = frozenset({"system", "user", "assistant", "tool"})
# A longer one would take a thread for seconds.
_MOST_CHARACTERS = 2_000_000
_TEXTS = frozenset({"text", "input_text", "output_text"})


class ModelTokenizer:
    """The tokenizer of a model's folder, and its chat template if it has one.

    Raises:
        ConfigError: the packages or a file are missing, or a file is unusable.
    """

    def __init__(self, folder: str) -> None:
        try:
            from jinja2.sandbox import ImmutableSandboxedEnvironment
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ConfigError(
                f"a tokenizer needs {error.name}, which is not installed: pip install "
                "'evenstep[tokenizer]'"
            ) from None
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_refuse, strftime_now=time.strftime)
        path, self._folder, self._failed = Path(folder), folder, False
        try:
            self._tokenizer = Tokenizer.from_buffer((path / "tokenizer.json").read_bytes())
            config: Json = json.loads(_text(path / "tokenizer_config.json") or "{}")
            template = _text(path / "chat_template.jinja") or config.get("chat_template")
            said = template if isinstance(template, str) else ""
            self._template = environment.from_string(_ANSWERS.sub(_always, said)) if said else None
        except Exception as error:  # tokenizers raises nothing more special
            raise ConfigError(f"tokenizer {folder}: {error}") from error
        self._parts = _READS_PARTS.search(said) is not None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._special = {
            name: token["content"] if isinstance(token, dict) else token
            for name, token in config.items()
            if name.endswith("_token") and isinstance(token, str | dict)
        }

    def ids(self, body: Mapping[str, Any]) -> list[int] | None:
        """Token ids of a body's decoded prompt, without one of its chat.

        None, and logged the first time: they are not known to be the engine's.
        """
        try:
            text = body["prompt"] if "prompt" in body else self._rendered(body)
            if isinstance(text, list):
                (text,) = text
            if len(text) > _MOST_CHARACTERS:
                raise ValueError(f"above {_MOST_CHARACTERS:,} characters")
            # Tokens that begin or end each prompt; templates have them in their text.
            special = bool(body.get("add_special_tokens", "prompt" in body))
            # Without offsets, which cost more than the ids; other threads can run meanwhile.
            return [*self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids]
        except Exception as error:  # noqa: BLE001 - a template may raise anything
            if not self._failed:
                self._failed = True
                told = "tokenizer %s cannot do a prompt, which counts as a text: %.200s"
                log.warning(told, self._folder, error)
            return None

    def _rendered(self, body: Mapping[str, Any]) -> str:
        if self._template is None:
            raise ValueError("the folder has no chat template")
        if body.get("chat_template") or body.get("continue_final_message"):
            raise ValueError("the request has a template of its own, or goes on with an answer")
        values = {**self._special, **(body.get("chat_template_kwargs") or {})}
        if (effort := body.get("reasoning_effort")) is not None:
            values.setdefault("enable_thinking", effort != "none")
            values["reasoning_effort"] = effort
        prompted = body.get("add_generation_prompt")
        values["add_generation_prompt"] = prompted is None or prompted
        tools = body.get("tools")
        values |= {
            "messages": [self._message(each) for each in body["messages"]],
            "tools": None if tools is None else [_tool(each["function"]) for each in tools],
            "documents": body.get("documents"),
        }
        return str(self._template.render(values))

    def _message(self, said: Json) -> Json:
        """A message as vLLM hands it to templates."""
        if (role := said["role"]) not in _ROLES:
            raise ValueError(f"a message of the role {role!r}")
        content = said.get("content")
        texts = [content] if isinstance(content, str) else [_part(each) for each in content or ()]
        message: Json = {"role": role, "content": "\n".join(texts)}
        if self._parts and role != "tool":
            message["content"] = [{"type": "text", "text": text} for text in texts]
        for name in ("name", "tool_call_id") if role == "tool" else ("name",):
            if name in said:
                message[name] = said[name]
        if role == "assistant":
            if calls := said.get("tool_calls"):
                message["tool_calls"] = [_call(each) for each in calls]
            thought = said.get("reasoning") or said.get("reasoning_content")
            if thought is not None:
                message["reasoning"] = message["reasoning_content"] = thought
        return message


@cache
def tokenizer_of(folder: str) -> ModelTokenizer:
    """That of a folder, read once; raises as ``ModelTokenizer``."""
    return ModelTokenizer(folder)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _always(tag: re.Match[str]) -> str:
    return tag[1] + ("endif" if tag[2] else "if true") + tag[3]


def _refuse(message: str) -> None:
    raise ValueError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if part.get("type") not in _TEXTS:
        raise ValueError(f"a part of the type {part.get('type')!r}")
    text: str = part["text"]
    return text


def _call(call: Json) -> Json:
    """A tool call with its arguments as an object; what is none becomes an empty one."""
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            arguments = None
    function["arguments"] = arguments if isinstance(arguments, dict) else {}
    return {**call, "function": function}


def _tool(function: Json) -> Json:
    """A tool as vLLM writes it: its own fields in its own order."""
    told = {name: function.get(name) for name in ("name", "description", "parameters")}
    further = {name: function.get(name) for name in ("strict", "defer_loading")}
    told |= {name: value for name, value in further.items() if value is not None}
    return {"type": "function", "function": told}
