"""vLLM's answers as bytes: SSE events and whole bodies, for both completion endpoints."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import NamedTuple

import msgspec

from loadgen.emulator.generation import RejectedError

DONE = b"data: [DONE]\n\n"

KvParams = dict[str, object] | None  # what an answer tells of KV that was kept

_encode = msgspec.json.encode
_ERROR_TYPES = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError"}


class Usage(NamedTuple):
    """Token counts of an answer; ``cached`` are of the prompt, from the prefix cache."""

    prompt: int
    completion: int
    cached: int = 0


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """How one choice ended, and its text (all of it, for whole bodies)."""

    text: str
    finish_reason: str
    stop_reason: str | None


@dataclass(frozen=True, slots=True)
class Phrasing:
    """Parts of an answer that differ between endpoints."""

    chunk: str  # the ``object`` of an event
    body: str  # the ``object`` of an unstreamed answer
    # Template of a choice's event before its first token, takes the index; None: no such event.
    first: bytes | None
    delta: bytes  # template of an event with more text, takes the index and the text
    # Function that returns the choice in its last event.
    last: Callable[[int, ChoiceEnd], dict[str, object]]
    # Function that returns the choice in an unstreamed answer.
    whole: Callable[[int, ChoiceEnd], dict[str, object]]


class Shape:
    """Encoder of one answer, named ``cmpl-…`` or ``chatcmpl-…`` as vLLM does."""

    def __init__(self, phrasing: Phrasing, answer_id: str, model: str, created: int) -> None:
        self._phrasing = phrasing
        self._fields = {"id": answer_id, "object": phrasing.chunk, "created": created}
        self._fields["model"] = model
        self._head = b"data: " + _encode(self._fields)[:-1] + b',"choices":['

    def first(self, choices: int) -> bytes:
        """Events before the first token."""
        event = self._phrasing.first
        if event is None:
            return b""
        return b"".join(self._head + event % index for index in range(choices))

    def delta(self, index: int, text: str) -> bytes:
        return self._head + self._phrasing.delta % (index, _encode(text))

    def last(self, index: int, end: ChoiceEnd) -> bytes:
        return self._head + _encode(self._phrasing.last(index, end)) + b"]}\n\n"

    def close(self, usage: Usage, *, include_usage: bool) -> bytes:
        """Events that end a stream, with token counts on request."""
        if not include_usage:
            return DONE
        counts = _usage(usage)
        if usage.cached:
            counts["prompt_tokens_details"] = _details(usage)
        return self._head + b'],"usage":' + _encode(counts) + b"}\n\n" + DONE

    def fail(self, rejected: RejectedError) -> bytes:
        return b"data: " + error_body(rejected) + b"\n\n" + DONE

    def whole(self, ends: Sequence[ChoiceEnd], usage: Usage, kv_params: KvParams) -> bytes:
        """Body of an unstreamed answer."""
        body = {
            **self._fields,
            "object": self._phrasing.body,
            "choices": [self._phrasing.whole(index, end) for index, end in enumerate(ends)],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": _usage(usage) | {"prompt_tokens_details": _details(usage)},
            "kv_transfer_params": kv_params,
        }
        return _encode(body)


def _completion_last(index: int, end: ChoiceEnd) -> dict[str, object]:
    return {
        "index": index,
        "text": end.text,
        "logprobs": None,
        "finish_reason": end.finish_reason,
        "stop_reason": end.stop_reason,
        "prompt_token_ids": None,
        "token_ids": None,
    }


def _chat_whole(index: int, end: ChoiceEnd) -> dict[str, object]:
    message: dict[str, object] = {
        "role": "assistant",
        "content": end.text,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": [],
        "reasoning": None,
    }
    return {"index": index, "message": message, **_chat_end(end)}


def _chat_end(end: ChoiceEnd) -> dict[str, object]:
    return {
        "logprobs": None,
        "finish_reason": end.finish_reason,
        "stop_reason": end.stop_reason,
        "token_ids": None,
    }


COMPLETION = Phrasing(
    chunk="text_completion",
    body="text_completion",
    first=None,
    delta=b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null,"stop_reason":null,'
    b'"prompt_token_ids":null,"token_ids":null}]}\n\n',
    last=_completion_last,
    whole=lambda index, end: {**_completion_last(index, end), "prompt_logprobs": None},
)
CHAT = Phrasing(
    chunk="chat.completion.chunk",
    body="chat.completion",
    first=b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,'
    b'"finish_reason":null}],"prompt_token_ids":null}\n\n',
    delta=b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null,'
    b'"token_ids":null}]}\n\n',
    last=lambda index, end: {"index": index, "delta": {"content": end.text}, **_chat_end(end)},
    whole=_chat_whole,
)


def error_body(rejected: RejectedError) -> bytes:
    """As vLLM sends it."""
    error = {
        "message": rejected.message,
        "type": _ERROR_TYPES.get(rejected.status) or HTTPStatus(rejected.status).phrase,
        "param": rejected.param,
        "code": rejected.status,
    }
    return _encode({"error": error})


def _usage(usage: Usage) -> dict[str, object]:
    return {
        "prompt_tokens": usage.prompt,
        "total_tokens": usage.prompt + usage.completion,
        "completion_tokens": usage.completion,
    }


def _details(usage: Usage) -> dict[str, object] | None:
    """As vLLM with ``--enable-prompt-tokens-details``."""
    return {"cached_tokens": usage.cached} if usage.cached else None
