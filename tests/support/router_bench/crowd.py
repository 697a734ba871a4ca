"""Very many clients for the bench of many streams: some that are only connected, some that read.

    python -m tests.support.router_bench.crowd --port 8000 --idle 10000 --streams 2000

Says a line when it has come so far, and goes on when it is told one: ``idle`` once each of so many
connections has had an answer and is kept; ``streaming`` once each of so many streams has had its
first event; then a line of JSON, and it ends.
"""

import argparse
import asyncio
import gc
import json
import sys
from typing import cast

import uvloop

from tests.support.router_bench.load import Client, Counted, request

# A listener's backlog is not to be overrun, nor the pool.
_AT_ONCE = 200
_STAGGER_S = 0.001
_WORDS = 50


class Idle(asyncio.Protocol):
    """A connection that has had one answer, and is kept."""

    def __init__(self, port: int) -> None:
        self._request = f"GET /version HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n\r\n".encode()
        self.answered = asyncio.Event()
        self.open = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"HTTP/1.1 200"):
            self.answered.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        self.answered.set()


async def gather(options: argparse.Namespace) -> None:
    """All of it."""
    loop = asyncio.get_running_loop()
    idle = await _idle(loop, options)
    await _say("idle")
    counted = Counted(request(options.port, _WORDS, options.events, ""))
    for _ in range(options.streams):
        await loop.create_connection(lambda: Client(counted), "127.0.0.1", options.port)
        await asyncio.sleep(_STAGGER_S)
    while len(counted.first_ms) < options.streams and counted.open == options.streams:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await _say("streaming")
    told = {
        "idle": sum(one.open for one in idle),
        "streams": counted.open,
        "events": counted.events,
        "errors": counted.errors + counted.lost,
    }
    print(json.dumps(told), flush=True)  # noqa: T201


async def _idle(loop: asyncio.AbstractEventLoop, options: argparse.Namespace) -> list[Idle]:
    idle: list[Idle] = []
    while len(idle) < options.idle:
        some = [Idle(options.port) for _ in range(min(_AT_ONCE, options.idle - len(idle)))]
        for one in some:
            await loop.create_connection(lambda one=one: one, "127.0.0.1", options.port)  # type: ignore[misc]
        for one in some:
            await one.answered.wait()
        idle += some
    return idle


async def _say(word: str) -> None:
    """Say it, and wait for a line."""
    print(word, flush=True)  # noqa: T201
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--idle", type=int, default=10_000)
    parser.add_argument("--streams", type=int, default=2_000)
    parser.add_argument("--events", type=int, default=200, help="of a stream")
    options = parser.parse_args()
    gc.disable()
    uvloop.run(gather(options))


if __name__ == "__main__":
    main()
