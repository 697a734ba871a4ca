"""What differs between the endpoints that generate: events, errors, who names a request."""

import json
from typing import Any

import pytest

from router.core.errors import NoWorkerError, UnknownModelError
from router.proxy.answers import error_answer, tokens_of
from router.proxy.dialects import COMPLETIONS, MESSAGES, RESPONSES, Dialect
from router.proxy.event_stream import with_comment


def event(name: str, **data: object) -> bytes:
    """One as vLLM (0.32) writes it."""
    return f"event: {name}\ndata: {json.dumps({'type': name, **data})}\n\n".encode()


TEXT = event("content_block_delta", delta={"type": "text_delta", "text": "event: message_stop\n"})
STOP = event("message_stop")
MESSAGE = [
    event("message_start", message={"usage": {"input_tokens": 3, "output_tokens": 0}}),
    event("content_block_start", index=0),
    TEXT,
    TEXT,
    event("content_block_delta", index=0, delta={"type": "signature_delta"}).replace(
        b'"delta": {"type": "sig', b'"delta":{"type":"sig'
    ),
    event("content_block_stop", index=0),
    event("message_delta", delta={"stop_reason": "max_tokens"}),
]
RESPONSE = [
    event("response.created", response={}),
    event("response.output_item.added"),
    event("response.reasoning_text.delta", delta=".delta\n"),
    event("response.output_text.delta", delta="event: response.completed\n"),
    event("response.function_call_arguments.delta", delta="{"),
    event("response.output_text.done", text="a"),
]
COMPLETED = event("response.completed", response={"status": "completed"})


@pytest.mark.parametrize(
    ("dialect", "events", "end", "tokens"),
    [
        pytest.param(MESSAGES, MESSAGE, STOP, 2, id="messages"),
        pytest.param(RESPONSES, RESPONSE, COMPLETED, 3, id="responses"),
        pytest.param(RESPONSES, RESPONSE, event("response.incomplete"), 3, id="incomplete"),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_events_with_names(
    dialect: Dialect, events: list[bytes], end: bytes, tokens: int, size: int
) -> None:
    stream = dialect.stream()
    whole = b"".join(events)

    passed = b"".join(stream.feed(whole[at : at + size]) for at in range(0, len(whole), size))

    assert (passed, stream.rest()) == (whole, b"")
    assert (stream.tokens, stream.events, stream.done) == (tokens, len(events), False)
    assert stream.feed(end) == end
    assert (stream.tokens, stream.events, stream.done) == (tokens, len(events) + 1, True)
    assert with_comment(TEXT + end, stream.end(TEXT + end), b"x") == TEXT + b": x\n\n" + end
    assert stream.end(TEXT) is None


def said(dialect: Dialect) -> tuple[str, dict[str, Any]]:
    """An error inside a stream: its event's name, and its data."""
    events = dialect.error_event("broke\n\noff", "BadGatewayError", 502, 9)
    assert dialect.stream().feed(events) == events
    assert events.count(b"\n\n") == 1
    name, _, data = events.decode().rpartition("data: ")
    return name.removeprefix("event: ").strip(), json.loads(data)


def test_an_error_inside_a_stream() -> None:
    error = {"message": "broke\n\noff", "type": "BadGatewayError", "param": None, "code": 502}
    event_fields = {"type": "error", "sequence_number": 9, "code": "BadGatewayError"}

    assert said(COMPLETIONS) == ("", {"error": error})
    told = {"message": "broke\n\noff", "type": "BadGatewayError"}
    assert said(MESSAGES) == ("error", {"type": "error", "error": told})
    assert said(RESPONSES) == (
        "error",
        {**event_fields, "message": "broke\n\noff", "param": None, "error": error},
    )


@pytest.mark.parametrize("error", [NoWorkerError("all down"), UnknownModelError("no", "model")])
def test_a_whole_error(error: NoWorkerError) -> None:
    plain = error_answer(error)

    assert COMPLETIONS.error(plain) == RESPONSES.error(plain) == plain
    typed = MESSAGES.error(plain)
    told = json.loads(plain.body)["error"]
    told = {"type": told["type"], "message": str(error)}
    assert json.loads(typed.body) == {"type": "error", "error": told}
    assert (typed.status, typed.headers) == (plain.status, plain.headers)


def test_who_names_a_request() -> None:
    body = b'{ "input":"a", "request_id" :"resp_es-forged", "request_\\u0069d": "x", "seed":1}'

    assert COMPLETIONS.body_up(body, "es-1") == MESSAGES.body_up(body, "es-1") == body
    told = RESPONSES.body_up(body, "es-1")
    # Of a field that is there twice the last one counts.
    assert json.loads(told) == {"input": "a", "request_id": "resp_es-1", "seed": 1}
    assert told.startswith(body[:-1])
    assert RESPONSES.body_up(b" { } ", "es-1") == b' { "request_id":"resp_es-1"} '


@pytest.mark.parametrize(
    ("usage", "counted"),
    [
        ({"prompt_tokens": 5, "total_tokens": 9, "completion_tokens": 4}, (5, 4)),
        ({"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 2}}, (5, 0)),
        (
            {"input_tokens": 5, "input_tokens_details": {"cached_tokens": 2}, "output_tokens": 4},
            (5, 4),
        ),
        ({"input_tokens": 5, "output_tokens": 4, "cache_read_input_tokens": 16}, (21, 4)),
        ({"completion_tokens": 4}, None),
        ({"input_tokens": "5"}, None),
    ],
)
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_tokens_of_a_whole_answer(
    usage: dict[str, Any], counted: object, separators: tuple[str, str]
) -> None:
    text = 'says "usage": {"prompt_tokens": 1}'
    body = json.dumps({"output": [{"text": text}], "usage": usage}, separators=separators)

    assert tokens_of(body.encode()) == counted


def test_an_answer_that_counts_nothing() -> None:
    assert tokens_of(b'{"usage":null}') is None
    assert tokens_of(b"") is None
