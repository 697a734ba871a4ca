"""The official client before an engine and before a router, and what both must be told alike."""

from collections.abc import Iterable
from functools import reduce
from typing import Any

import openai

from tests.support.server import Server

GROUP = "tiny-group"

# Names and times: what differs between two answers to one request.
_VARYING = frozenset(
    ["id", "created", "created_at", "completed_at", "item_id", "call_id", "signature", "request_id"]
)
# Texts that come in pieces.
_PIECES = frozenset(
    ("text", "content", "arguments", "reasoning", "delta", "partial_json", "thinking")
)


def client_of(server: Server) -> openai.OpenAI:
    """A client that takes no for an answer."""
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def content(answer: Any) -> Any:
    """Everything but names and times."""
    if hasattr(answer, "model_dump"):
        answer = answer.model_dump(warnings=False)
    if isinstance(answer, dict):
        return {name: content(value) for name, value in answer.items() if name not in _VARYING}
    return [content(each) for each in answer] if isinstance(answer, list) else answer


def joined(chunks: Iterable[Any]) -> Any:
    """The chunks of a stream as one; how many tokens come in a chunk may vary."""
    return reduce(_join, (content(chunk) for chunk in chunks))


def failure(error: openai.APIError) -> dict[str, Any]:
    """What a client learns of an error."""
    said = {"class": type(error).__name__, "status": getattr(error, "status_code", None)}
    return {**said, "body": error.body, "param": error.param, "code": error.code}


def _join(first: Any, more: Any, name: str = "") -> Any:
    if first is None or more is None:
        return more if first is None else first
    if isinstance(first, dict):
        return {
            key: _join(first.get(key), more.get(key), key) for key in dict.fromkeys([*first, *more])
        }
    if isinstance(first, list):
        return _join_lists(first, more)
    return first + more if name in _PIECES else more


def _join_lists(first: list[Any], more: list[Any]) -> list[Any]:
    """Those with numbers by their numbers, others one behind the other."""
    if not all(isinstance(each, dict) and "index" in each for each in first + more):
        return first + more
    by_index = {each["index"]: each for each in first}
    for each in more:
        by_index[each["index"]] = _join(by_index.get(each["index"]), each)
    return [by_index[index] for index in sorted(by_index)]
