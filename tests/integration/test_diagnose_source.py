"""Listening to an admin port: whatever comes from there, and however it is cut."""

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from loadgen.diagnose.diagnose_command import recording_from
from router.core.errors import ConfigError, InputError
from router.recording.lines import encode
from tests.support.recorded import header, step

LINES = [encode(header(2)), *(encode(step(number, [5, 5])) for number in range(1, 31))]


@contextlib.contextmanager
def answering(chunks: list[bytes], status: int = 200) -> Iterator[tuple[str, list[str]]]:
    """A server that streams these chunks; yields its URL, and the paths that it is asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()
            for chunk in chunks:
                self.wfile.write(chunk)
                self.wfile.flush()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/", asked
        finally:
            server.shutdown()


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_lines_come_in_chunks_of_any_size(size: int) -> None:
    body = b"".join(LINES)
    chunks = [body[start : start + size] for start in range(0, len(body), size)]
    with answering(chunks) as (url, asked):
        recording = recording_from(url, 2.5)

    assert asked == ["/recording?seconds=2.5"]
    assert [each.step for each in recording.steps] == list(range(1, 31))
    assert recording.complete


def test_a_stream_that_breaks_off() -> None:
    with answering([*LINES, b'{"step":31,"gro']) as (url, _):
        recording = recording_from(url, 1)

    assert len(recording.steps) == 30
    assert not recording.complete


def test_another_server() -> None:
    refused = pytest.raises(ConfigError, match="answers 404; give the admin port")
    with answering([b"{}"], status=404) as (url, _), refused:
        recording_from(url, 1)


def test_no_recording() -> None:
    refused = pytest.raises(InputError, match="line 1: is not the header of a recording")
    with answering([b'{"object":"list"}\n']) as (url, _), refused:
        recording_from(url, 1)
