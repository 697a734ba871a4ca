"""Events of a streamed completion, as engines write them."""

import pytest

from loadgen.replay.stream import CompletionStream, error_message

CONTENT = b'data: {"id":"cmpl-1","choices":[{"index":0,"text":" a"}],"usage":null}\n\n'
USAGE = (
    b'data: {"id":"cmpl-1","choices":[],'
    b'"usage":{"prompt_tokens":7,"total_tokens":9,"completion_tokens":2}}\n\n'
)
DONE = b"data: [DONE]\n\n"


def read(*chunks: bytes) -> CompletionStream:
    stream = CompletionStream()
    for second, chunk in enumerate(chunks, start=1):
        stream.feed(chunk, float(second))
    return stream


def test_times_are_those_of_content() -> None:
    stream = read(b": ping\n\n", CONTENT, CONTENT * 3, USAGE, DONE)
    assert stream.first_s == 2.0
    assert stream.gaps_s == [1.0]
    assert (stream.output_tokens, stream.done, stream.error) == (2, True, None)


def test_crlf_and_spaces() -> None:
    stream = read(USAGE.replace(b"\n", b"\r\n").replace(b":", b": "), b"data:[DONE]\r\n\r\n")
    assert (stream.output_tokens, stream.done) == (2, True)


def test_text_that_looks_like_the_end() -> None:
    text = rb'data: {"choices":[{"text":"data: [DONE] \"error\" \"completion_tokens\":5"}]}'
    stream = read(text + b"\n\n")
    assert (stream.done, stream.output_tokens, stream.error) == (False, None, None)


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (b'data: {"error":{"message":"no memory","code":500}}', "error event: no memory"),
        (b'data: {"object":"error","message":"gone"}', "error event: gone"),
        (b'event: error\ndata: {"error":"odd"}', 'error event: {"error":"odd"}'),
        (b'data: {"usage":{"completion_tokens":', "broken event: "),
        (b'data: {"error":' + b"[" * 100_000, "broken event: "),
        (b'data: {"error":1,"message":"\xff"}', "broken event: "),
    ],
)
def test_error_events(event: bytes, error: str) -> None:
    stream = read(CONTENT, event + b"\n\n", DONE)
    assert stream.error is not None
    assert stream.error.startswith(error)
    assert stream.done


def test_null_error_is_none() -> None:
    assert read(USAGE.replace(b'"choices"', b'"error":null,"choices"')).error is None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":{"message":"full","type":"x"}}', "full"),
        (b'{"message":"flat"}', "flat"),
        (b"<html>", "<html>"),
        (b'{"detail":"x"}', '{"detail":"x"}'),
        (b'{"message":"\xff"}', '{"message":"\ufffd"}'),
    ],
)
def test_error_message(body: bytes, message: str) -> None:
    assert error_message(body) == message
