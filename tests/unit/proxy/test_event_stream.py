import json

import pytest

from router.core.errors import UpstreamError
from router.http.refusal import error_body
from router.proxy.dialects import MESSAGES, RESPONSES
from router.proxy.event_stream import MOST_EVENT_BYTES, EventStream, check_end, with_comment

ONE = b'data: {"text":"a"}\n\n'
TWO = b'data: {"text":"b"}\n\n'
DONE = b"data: [DONE]\n\n"


def fed(*chunks: bytes) -> EventStream:
    stream = EventStream()
    for chunk in chunks:
        stream.feed(chunk)
    return stream


def test_whole_events_pass_at_once() -> None:
    stream = EventStream()

    assert stream.feed(ONE + TWO) == ONE + TWO
    assert stream.rest() == b""


def test_the_begin_of_an_event_waits_for_its_end() -> None:
    stream = EventStream()

    assert stream.feed(ONE + TWO[:5]) == ONE
    assert stream.rest() == TWO[:5]
    assert stream.feed(TWO[5:-1]) == b""
    assert stream.feed(TWO[-1:]) == TWO
    assert stream.rest() == b""


def test_carriage_returns() -> None:
    event = b"event: x\r\ndata: 1\r\n\r\n"
    stream = EventStream()

    assert stream.feed(event + event[:-1]) == event
    assert stream.feed(event[-1:] + b"data") == event
    assert stream.rest() == b"data"


def test_of_both_line_ends_the_later_counts() -> None:
    assert EventStream().feed(b"data: 1\r\n\r\ndata: 2\n\ndat") == b"data: 1\r\n\r\ndata: 2\n\n"
    assert EventStream().feed(b"data: 2\n\ndata: 1\r\n\r\ndat") == b"data: 2\n\ndata: 1\r\n\r\n"


def test_nothing_in_nothing_out() -> None:
    stream = EventStream()

    assert stream.feed(b"") == b""
    assert (stream.events, stream.done, stream.rest()) == (0, False, b"")


def test_events_are_counted_once_passed_on() -> None:
    assert fed(ONE + TWO[:-1]).events == 1
    assert fed(ONE + TWO[:-1], b"\n").events == 2


def test_what_bears_no_token_is_no_token() -> None:
    chat = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
    usage = b'data: {"choices":[],"usage":{"completion_tokens":2}}\n\n'
    empty = b'data: {"choices":[{"index":0,"delta":{"content":""}}]}\n\n'
    assert fed(chat).tokens == 0
    assert fed(chat, ONE, TWO, usage, DONE).tokens == 2
    assert fed(chat + chat + ONE + empty + TWO + usage + DONE).tokens == 3


def test_text_that_looks_like_an_event_is_not_counted() -> None:
    assert fed(b'data: {"text":"data: data: "}\n\n').events == 1


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
@pytest.mark.parametrize("mark", [b"data: [DONE]", b"data:[DONE]"])
@pytest.mark.parametrize("before", [b"", ONE, ONE * 100])
@pytest.mark.parametrize("after", [b"", b": closing\n\n" * 20])
def test_done_is_seen_wherever_it_is_cut(
    mark: bytes, end: bytes, before: bytes, after: bytes
) -> None:
    whole = before + mark + end + after

    for cut in range(len(whole)):
        stream = fed(whole[:cut])
        passed_on = cut >= len(before + mark + end)
        assert stream.done is passed_on
        stream.feed(whole[cut:])
        assert stream.done


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"text":"data: [DONE]"}\n\n',
        b'data: {"text":"\\n\\ndata: [DONE]\\n\\n"}\n\n',
        b"data: [DONE] said the model\n\n",
        b"data: [DONE\n\n",
        b"event: [DONE]\n\n",
        b"data: [DONE]",
        b"data: [DONE]\n",
    ],
)
def test_what_only_looks_like_done(event: bytes) -> None:
    assert not fed(event).done
    assert not fed(ONE, event).done
    assert not fed(ONE + event).done


def test_errors_are_what_clients_of_openai_expect() -> None:
    body = error_body("no such model", "NotFoundError", 404, param="model")

    assert json.loads(body) == {
        "error": {
            "message": "no such model",
            "type": "NotFoundError",
            "param": "model",
            "code": 404,
        }
    }


def test_of_a_huge_event_no_byte_is_searched_twice() -> None:
    stream = EventStream()
    piece = b"x" * 100
    for _ in range(1000):
        assert stream.feed(piece) == b""
        assert len(stream._seam) == 3

    assert stream.feed(b"\n\n") == piece * 1000 + b"\n\n"


def commented(events: bytes) -> bytes:
    return with_comment(events, EventStream().end(events), b"x: 1")


def test_a_comment_stands_before_the_end() -> None:
    assert commented(ONE + DONE) == ONE + b": x: 1\n\n" + DONE
    assert commented(DONE) == b": x: 1\n\n" + DONE
    assert commented(ONE) == ONE + b": x: 1\n\n"
    done = b"data: [DONE]\r\n\r\n"
    assert commented(b"data: 1\r\n\r\n" + done) == b"data: 1\r\n\r\n: x: 1\n\n" + done


LINE_ENDS = (b"\n", b"\r", b"\r\n")


@pytest.mark.parametrize("line", LINE_ENDS)
@pytest.mark.parametrize("blank", LINE_ENDS)
def test_events_end_however_lines_end(line: bytes, blank: bytes) -> None:
    if line + blank == b"\r\n":
        return  # one line end
    one, two = b"event: x" + line + b"data: 1" + line + blank, b"data: [DONE]" + line + blank
    whole = one + two + b"data: "

    for cut in range(len(whole)):
        stream = EventStream()
        passed = stream.feed(whole[:cut]) + stream.feed(whole[cut:])
        assert passed + stream.rest() == whole
        assert (stream.events, stream.done, stream.rest().strip()) == (2, True, b"data:")


def test_an_event_that_ends_in_carriage_returns_alone_passes_at_once() -> None:
    event = b"data: 1\r\r"
    assert EventStream().feed(event) == event


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_named_events_however_lines_end(end: bytes) -> None:
    stream = RESPONSES.stream()
    stream.feed(b"event: response.output_text.delta" + end + b"data: {}" + end * 2)
    assert (stream.tokens, stream.done) == (1, False)
    stream.feed(b"event: response.completed" + end + b"data: {}" + end * 2)
    assert (stream.tokens, stream.done) == (1, True)

    messages = MESSAGES.stream()
    messages.feed(b"event: content_block_delta" + end + b"data: {}" + end * 2)
    messages.feed(b"event: message_stop" + end + b"data: {}" + end * 2)
    assert (messages.tokens, messages.done) == (1, True)


def test_an_event_without_an_end_has_a_bound() -> None:
    stream, piece = EventStream(), b"x" * (MOST_EVENT_BYTES // 16)
    for _ in range(16):
        assert stream.feed(piece) == b""

    with pytest.raises(UpstreamError, match="an event has more than 16,777,216 bytes"):
        stream.feed(b"x")
    assert stream.rest() == b""


@pytest.mark.parametrize(
    ("came", "framed", "whole"),
    [
        (ONE + DONE, False, True),
        (ONE, True, True),
        (b"", True, True),
        (ONE + b"\r\n", True, True),
        (ONE + b"data: [DONE]", False, True),
        (ONE + b"data: [DONE]\n", False, True),
        (DONE + b"data: 1", False, True),
        (ONE, False, False),
        (b"", False, False),
        (ONE + TWO[:-1], False, False),
        (ONE + TWO[:-1], True, True),
    ],
)
def test_an_answer_that_ends_in_the_midst_is_not_whole(
    came: bytes, framed: bool, whole: bool
) -> None:
    stream = fed(came)
    if whole:
        check_end(stream, framed)
    else:
        with pytest.raises(UpstreamError, match="before its answer's last event"):
            check_end(stream, framed)
