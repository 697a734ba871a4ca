"""Holds what the clients of a chaos run have received against what the fleet says that it sent."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from loadgen.emulator.sent import Sent
from tests.support.chaos_clients import Got

COMPLETE, LEFT, BROKEN = "complete", "left", "broken off"
STATUSES = frozenset({400, 429, 500, 502, 503, 504})

Attempts = Mapping[str, Sent]


@dataclass(frozen=True, slots=True)
class Heard:
    """How a request ended for its client, and what it was told until then.

    Attributes:
        end: complete, left, broken off with a code, or the status of an error.
        unread: the client left before any answer.
        attempt: the id that an engine was given; empty if no answer says it.
        tokens: that were asked for.
    """

    end: str
    unread: bool
    attempt: str
    text: str
    tokens: int


def hear(got: Got) -> Heard:
    """Read an answer, which must have ended exactly once.

    Raises:
        AssertionError: it did not; says what of which request.
    """
    try:
        return _hear(got)
    except (AssertionError, ValueError, KeyError, IndexError) as error:
        tail = bytes(got.body[-300:])
        raise AssertionError(f"{got.ask}: {error!r}; {got.status}, ends with {tail!r}") from error


def _hear(got: Got) -> Heard:
    assert got.trouble is None, got.trouble
    assert got.done is not got.left
    if got.status == 200 and got.ask.stream:
        return _stream(got)
    if got.left:
        return _heard(got, LEFT)
    return _whole(got) if got.status == 200 else _heard(got, _error(got))


def _error(got: Got) -> str:
    error = json.loads(got.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == got.status
    assert got.status in STATUSES
    return str(got.status)


def _whole(got: Got) -> Heard:
    answer = json.loads(got.body)
    (choice,) = answer["choices"]
    assert answer["usage"]["completion_tokens"] == got.ask.output_tokens
    text = choice["message"]["content"] if got.ask.chat else choice["text"]
    return _heard(got, COMPLETE, answer["id"], text)


def _stream(got: Got) -> Heard:
    """Text as far as it came, and one end of it: closed, one error, or the client left."""
    assert got.headers["content-type"].startswith("text/event-stream")
    assert got.left or got.body.endswith(b"\n\n"), "an event without an end"
    events = got.events
    end = LEFT if got.left else _end(events)
    events = [event for event in events if event is not None and "error" not in event]
    ids = {event["id"] for event in events} or {""}
    assert len(ids) == 1, "two answers in one"
    ends = [event["choices"][0]["finish_reason"] for event in events]
    assert set(ends[:-1]) <= {None}, "something after the last token"
    assert end != COMPLETE or ends[-1] is not None, "no last token"
    return _heard(got, end, ids.pop(), "".join(_text(event, got.ask.chat) for event in events))


def _end(events: Sequence[Any]) -> str:
    """Whether a stream that has ended is closed or says one error; nothing follows either."""
    errors = sum(event is not None and "error" in event for event in events)
    if not errors:
        assert events[-1] is None, "no end"
        assert None not in events[:-1], "something after the end"
        return COMPLETE
    assert errors == 1, f"{errors} errors"
    last = events[-2] if events[-1] is None else events[-1]
    assert "error" in last, "something after the error"
    return f"{BROKEN}, {last['error']['code']}"


def _heard(got: Got, end: str, answer_id: str = "", text: str = "") -> Heard:
    # ``cmpl-ID`` or ``chatcmpl-ID``
    attempt = answer_id.partition("-")[2]
    return Heard(end, got.left and not got.status, attempt, text, got.ask.output_tokens)


def _text(event: Mapping[str, Any], chat: bool) -> str:
    (choice,) = event["choices"]
    return str(choice["delta"].get("content") or "" if chat else choice["text"])


def attempts_of(record: Iterable[Sent]) -> Attempts:
    """The record by the id that an engine was given: another one at every attempt.

    Only a connection that had been idle and broke at once is taken to have been closed before, and
    the same is sent on another.
    """
    attempts: dict[str, Sent] = {}
    for sent in record:
        before = attempts.get(sent.request)
        assert before is None or not any(before.tokens), f"an attempt was made twice: {sent}"
        attempts[sent.request] = sent
    return attempts


def hold(heard: Heard, attempts: Attempts) -> None:
    """No token is missing, none is there twice, none is another's.

    Raises:
        AssertionError: one is.
    """
    if heard.end == COMPLETE:
        sent = attempts[heard.attempt]
        assert (sent.complete, sent.tokens, sent.texts) == (True, (heard.tokens,), (heard.text,))
    elif heard.text:
        assert attempts[heard.attempt].texts[0].startswith(heard.text), heard


def by_client(attempts: Attempts) -> Mapping[str, Sequence[Sent]]:
    """Attempts by what the client calls its request, ``ROUTER-ID.CLIENT-ID``, in their order."""
    found: defaultdict[str, list[Sent]] = defaultdict(list)
    for sent in sorted(attempts.values(), key=lambda sent: sent.began_s):
        found[sent.request.partition(".")[2]].append(sent)
    return found


def overlap_s(sent: Sequence[Sent]) -> float:
    """For how long two workers had a request at once."""
    return max((one.ended_s - other.began_s for one, other in pairwise(sent)), default=0.0)
