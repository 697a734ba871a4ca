"""Clients for the router bench, at little cost: a closed loop of requests on kept connections.

    python -m tests.support.router_bench.load --port 8000 --clients 64 --seconds 2 --events 50

Prints one JSON object. Times are in milliseconds: ``first`` until an answer's first byte, ``whole``
until its last, ``transit`` of an event from the engine's send (``"t"``) until here, the last one of
each read.
"""

import argparse
import asyncio
import gc
import json
import re
import sys
import time
from dataclasses import dataclass, field
from typing import cast

import httptools
import uvloop

_SENT = re.compile(rb'"t":"(\d{19})"')
_SHARES = {"p50": 0.5, "p99": 0.99, "max": 1.0}


@dataclass
class Counted:
    """What all clients have seen."""

    request: bytes
    ending: bool = False
    open: int = 0
    requests: int = 0
    events: int = 0
    reads: int = 0
    errors: int = 0
    lost: int = 0
    first_ms: list[float] = field(default_factory=list)
    whole_ms: list[float] = field(default_factory=list)
    transit_ms: list[float] = field(default_factory=list)


class Client(asyncio.Protocol):
    """One connection, with one request at a time."""

    def __init__(self, counted: Counted) -> None:
        self._counted = counted
        self._transport: asyncio.Transport
        self._began_s = 0.0
        self._begun = self._waiting = False
        self._parser: httptools.HttpResponseParser

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._counted.open += 1
        self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        self._counted.open -= 1
        self._counted.lost += self._waiting

    def data_received(self, data: bytes) -> None:
        counted = self._counted
        events = data.count(b"\ndata: {")
        if events:
            counted.events += events
            counted.reads += 1
            sent = _SENT.search(data, data.rfind(b'"t":"'))
            if sent is not None:
                counted.transit_ms.append((time.monotonic_ns() - int(sent[1])) / 1e6)
        self._parser.feed_data(data)

    def on_headers_complete(self) -> None:
        self._counted.errors += self._parser.get_status_code() != 200

    def on_body(self, body: bytes) -> None:
        if not self._begun:
            self._begun = True
            self._counted.first_ms.append(self._passed_ms())

    def on_message_complete(self) -> None:
        self._counted.whole_ms.append(self._passed_ms())
        self._counted.requests += 1
        self._waiting = False
        if self._counted.ending:
            self._transport.close()
        else:
            asyncio.get_running_loop().call_soon(self._ask)

    def _passed_ms(self) -> float:
        return (time.perf_counter() - self._began_s) * 1e3

    def _ask(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._begun, self._waiting = False, True
        self._began_s = time.perf_counter()
        self._transport.write(self._counted.request)


def request(port: int, words: int, events: int, key: str) -> bytes:
    """A chat request as OpenAI's client writes it; ``events`` of 0: not streamed."""
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": "word " * words}],
            "model": "bench",
            "max_tokens": events or 16,
            **({"stream": True} if events else {}),
        }
    ).encode()
    lines = (
        "POST /v1/chat/completions HTTP/1.1",
        f"host: 127.0.0.1:{port}",
        "accept: application/json",
        "content-type: application/json",
        "user-agent: bench",
        f"authorization: Bearer {key}",
        f"content-length: {len(body)}",
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def load(options: argparse.Namespace) -> dict[str, float]:
    """Ask for so long, let what is under way end, and say what came."""
    loop = asyncio.get_running_loop()
    counted = Counted(request(options.port, options.words, options.events, options.key))
    gc.disable()
    began_s = time.perf_counter()
    for _ in range(options.clients):
        await loop.create_connection(lambda: Client(counted), "127.0.0.1", options.port)
        await asyncio.sleep(options.stagger_ms / 1e3)
    await asyncio.sleep(options.seconds)
    asked_s, requests, events = time.perf_counter() - began_s, counted.requests, counted.events
    counted.ending = True
    end_s = loop.time() + options.drain_s
    while counted.open and loop.time() < end_s:  # noqa: ASYNC110 - many may end in one turn
        await asyncio.sleep(0.005)
    shown = {"first": counted.first_ms, "whole": counted.whole_ms, "transit": counted.transit_ms}
    return {
        "requests": counted.requests,
        "events": counted.events,
        "requests_per_s": requests / asked_s,
        "events_per_s": events / asked_s,
        "events_per_read": counted.events / counted.reads if counted.reads else 0.0,
        "errors": counted.errors,
        "lost": counted.lost,
        "unended": counted.open,
        "seconds": time.perf_counter() - began_s,
        **{
            f"{name}_{share}_ms": _quantile(values, _SHARES[share])
            for name, values in shown.items()
            for share in _SHARES
        },
    }


def _quantile(values: list[float], share: float) -> float:
    if not values:
        return 0.0
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--events", type=int, default=0, help="of a stream; 0: no streams")
    parser.add_argument("--words", type=int, default=50, help="of a prompt")
    parser.add_argument("--stagger-ms", type=float, default=0.0, help="between connections")
    parser.add_argument("--drain-s", type=float, default=15.0, help="for what is under way")
    parser.add_argument("--key", default="", help="that is shown")
    json.dump(uvloop.run(load(parser.parse_args())), sys.stdout)


if __name__ == "__main__":
    main()
