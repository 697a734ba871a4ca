"""vLLM's answers as bytes: SSE events and whole bodies, for both completion endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

import msgspec

from loadgen.emulator.generation import RejectedError

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.encode
_ERROR_TYPES = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError"}


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """How one choice ended, and all that it says (for whole bodies)."""

    text: str
    finish_reason: str
    stop_reason: str | None


class Shape(Protocol):
    """How one endpoint phrases an answer."""

    def first(self, choices: int) -> bytes:
        """Events that go out before the first token."""
        ...

    def delta(self, index: int, text: str) -> bytes:
        """The event for more text of a choice."""
        ...

    def last(self, index: int, end: ChoiceEnd) -> bytes:
        """The event for the last text of a choice."""
        ...

    def usage(self, prompt_tokens: int, completion_tokens: int) -> bytes:
        """The event that counts tokens."""
        ...

    def whole(
        self,
        ends: Sequence[ChoiceEnd],
        prompt_tokens: int,
        completion_tokens: int,
        kv_transfer_params: dict[str, object] | None,
    ) -> bytes:
        """The body of an answer that is not streamed."""
        ...


class CompletionShape:
    """``/v1/completions``.

    Args:
        answer_id: ``cmpl-…``, as vLLM builds it from ``X-Request-Id``.
        created: seconds since 1970.
    """

    def __init__(self, answer_id: str, model: str, created: int) -> None:
        self._fields = {"id": answer_id, "object": "text_completion", "created": created}
        self._fields["model"] = model
        self._head = b"data: " + _encode(self._fields)[:-1] + b',"choices":['

    def first(self, choices: int) -> bytes:
        """Nothing."""
        return b""

    def delta(self, index: int, text: str) -> bytes:
        """The event for more text of a choice."""
        return (
            b'%b{"index":%d,"text":%b,"logprobs":null,"finish_reason":null,"stop_reason":null,'
            b'"prompt_token_ids":null,"token_ids":null}]}\n\n' % (self._head, index, _encode(text))
        )

    def last(self, index: int, end: ChoiceEnd) -> bytes:
        """The event for the last text of a choice."""
        choice = {
            "index": index,
            "text": end.text,
            "logprobs": None,
            "finish_reason": end.finish_reason,
            "stop_reason": end.stop_reason,
            "prompt_token_ids": None,
            "token_ids": None,
        }
        return self._head + _encode(choice) + b"]}\n\n"

    def usage(self, prompt_tokens: int, completion_tokens: int) -> bytes:
        """The event that counts tokens."""
        return self._head + b'],"usage":' + _usage(prompt_tokens, completion_tokens) + b"}\n\n"

    def whole(
        self,
        ends: Sequence[ChoiceEnd],
        prompt_tokens: int,
        completion_tokens: int,
        kv_transfer_params: dict[str, object] | None,
    ) -> bytes:
        """The body of an answer that is not streamed."""
        choices: list[dict[str, object]] = [
            {
                "index": index,
                "text": end.text,
                "logprobs": None,
                "finish_reason": end.finish_reason,
                "stop_reason": end.stop_reason,
                "token_ids": None,
                "prompt_logprobs": None,
                "prompt_token_ids": None,
            }
            for index, end in enumerate(ends)
        ]
        return _whole(self._fields, choices, prompt_tokens, completion_tokens, kv_transfer_params)


class ChatShape:
    """``/v1/chat/completions``.

    Args:
        answer_id: ``chatcmpl-…``, as vLLM builds it from ``X-Request-Id``.
        created: seconds since 1970.
    """

    def __init__(self, answer_id: str, model: str, created: int) -> None:
        self._fields = {"id": answer_id, "object": "chat.completion.chunk", "created": created}
        self._fields["model"] = model
        self._head = b"data: " + _encode(self._fields)[:-1] + b',"choices":['

    def first(self, choices: int) -> bytes:
        """One event per choice that names the role."""
        return b"".join(
            b'%b{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,'
            b'"finish_reason":null}],"prompt_token_ids":null}\n\n' % (self._head, index)
            for index in range(choices)
        )

    def delta(self, index: int, text: str) -> bytes:
        """The event for more text of a choice."""
        return (
            b'%b{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null,'
            b'"token_ids":null}]}\n\n' % (self._head, index, _encode(text))
        )

    def last(self, index: int, end: ChoiceEnd) -> bytes:
        """The event for the last text of a choice."""
        choice = {
            "index": index,
            "delta": {"content": end.text},
            "logprobs": None,
            "finish_reason": end.finish_reason,
            "stop_reason": end.stop_reason,
            "token_ids": None,
        }
        return self._head + _encode(choice) + b"]}\n\n"

    def usage(self, prompt_tokens: int, completion_tokens: int) -> bytes:
        """The event that counts tokens."""
        return self._head + b'],"usage":' + _usage(prompt_tokens, completion_tokens) + b"}\n\n"

    def whole(
        self,
        ends: Sequence[ChoiceEnd],
        prompt_tokens: int,
        completion_tokens: int,
        kv_transfer_params: dict[str, object] | None,
    ) -> bytes:
        """The body of an answer that is not streamed."""
        choices: list[dict[str, object]] = [
            {
                "index": index,
                "message": {
                    "role": "assistant",
                    "content": end.text,
                    "refusal": None,
                    "annotations": None,
                    "audio": None,
                    "function_call": None,
                    "tool_calls": [],
                    "reasoning": None,
                },
                "logprobs": None,
                "finish_reason": end.finish_reason,
                "stop_reason": end.stop_reason,
                "token_ids": None,
            }
            for index, end in enumerate(ends)
        ]
        fields = {**self._fields, "object": "chat.completion"}
        return _whole(fields, choices, prompt_tokens, completion_tokens, kv_transfer_params)


def error_body(rejected: RejectedError) -> bytes:
    """The error body that vLLM sends."""
    error = {
        "message": rejected.message,
        "type": _ERROR_TYPES.get(rejected.status) or HTTPStatus(rejected.status).phrase,
        "param": rejected.param,
        "code": rejected.status,
    }
    return _encode({"error": error})


def error_event(rejected: RejectedError) -> bytes:
    """The event with which a stream that fails ends, but for ``DONE``."""
    return b"data: " + error_body(rejected) + b"\n\n"


def _usage(prompt_tokens: int, completion_tokens: int) -> bytes:
    return _encode(
        {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "completion_tokens": completion_tokens,
        }
    )


def _whole(
    fields: dict[str, object],
    choices: Sequence[dict[str, object]],
    prompt_tokens: int,
    completion_tokens: int,
    kv_transfer_params: dict[str, object] | None,
) -> bytes:
    usage = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": None,
    }
    body = {
        **fields,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": None,
        "usage": usage,
        "kv_transfer_params": kv_transfer_params,
    }
    return _encode(body)
