"""Engines that cost next to nothing, for the router bench: nothing is computed, all is answered.

    python -m tests.support.router_bench.engines --port 9301 --snapshots 9401 --workers 8

Worker ``i`` listens on ``--port`` + i. A stream gets an event per step as a chunk of its own, in
the shape and size of vLLM's; a step takes ``--step-ms``. Other requests are answered at once.
Workers are in step with themselves only, as without a barrier: their steps are spread evenly.
With ``--snapshots`` each publishes its state after every step, as the vLLM plug-in does, with the
requests that it runs; ports are taken two by two from there.

An event says when it was sent (``"t"``, nanoseconds of CLOCK_MONOTONIC).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import re
import signal
import time
from collections.abc import Callable
from typing import cast

import httptools
import uvloop
import zmq

from engine_patches.stream.publisher import SnapshotPublisher, StepReport
from engine_patches.stream.rows import Row
from router.core.types import KvGroup

_EVENT = (
    b'data: {"id":"chatcmpl-6f1d0a5be2c94f7d8a3bb0c97f42d1e5","object":"chat.completion.chunk",'
    b'"created":1790000000,"model":"bench","t":"%019d","choices":[{"index":0,'
    b'"delta":{"content":" token"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
)
_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_MAX_TOKENS = re.compile(rb'"max_tokens": ?(\d+)')
_STREAM = re.compile(rb'"stream": ?true')
_PROMPT_TOKENS = 60


def _answer(body: bytes, kind: bytes = b"application/json", status: bytes = b"200 OK") -> bytes:
    head = b"HTTP/1.1 %s\r\nserver: uvicorn\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n"
    return head % (status, kind, len(body)) + body


_COMPLETION = _answer(
    b'{"id":"chatcmpl-6f1d0a5be2c94f7d8a3bb0c97f42d1e5","object":"chat.completion",'
    b'"created":1790000000,"model":"bench","choices":[{"index":0,"message":{"role":"assistant",'
    b'"content":"An answer of a few words, as most are."},"logprobs":null,'
    b'"finish_reason":"stop"}],"usage":{"prompt_tokens":60,"total_tokens":69,'
    b'"completion_tokens":9}}'
)
_MODELS = _answer(
    b'{"object":"list","data":[{"id":"bench","object":"model","created":1790000000,'
    b'"owned_by":"vllm","root":"bench","parent":null,"max_model_len":32768}]}'
)
_OTHERS = {
    b"/health": _answer(b""),
    b"/v1/models": _MODELS,
    b"/version": _answer(b'{"version":"0.32.0"}'),
    b"/metrics": _answer(b"", b"text/plain; version=0.0.4; charset=utf-8"),
    b"/server_info": _answer(b'{"model_id":"bench","served_model_name":"bench","dp_size":1}'),
    b"/get_server_info": _answer(b'{"model_path":"bench","served_model_name":"bench","dp_size":1}'),
    b"/get_model_info": _answer(b'{"model_path":"bench","is_generation":true}'),
    b"/model_info": _answer(b'{"model_path":"bench","is_generation":true}'),
}
_UNKNOWN = _answer(b'{"detail":"Not Found"}', status=b"404 Not Found")


class Worker:
    """One engine: the streams that it has, a step at a time.

    Args:
        number: of it.
        slots: as its snapshots say.
        snapshots: where they are published; None: nowhere.
        context: of ZMQ.
    """

    def __init__(
        self,
        number: int,
        slots: int,
        snapshots: str | None,
        context: zmq.Context[zmq.Socket[bytes]],
    ) -> None:
        self._number = number
        self.streams: dict[str, Connection] = {}
        self._entered: list[str] = []
        self._ended: list[str] = []
        self._publisher: SnapshotPublisher | None = None
        if snapshots is not None:
            self._publisher = SnapshotPublisher(
                snapshots,
                group="default",
                worker=f"default-{number}",
                rank=number,
                initial=StepReport(0, 0.0, 0.0, slots=slots),
                context=context,
                rows=lambda: [self._row(id_) for id_ in self.streams],
            )
            self._publisher.message.kv_groups = (KvGroup(16, 50_000, 100_000),)

    def enter(self, id_: str, connection: Connection) -> None:
        """A stream begins with the next step."""
        self.streams[id_] = connection
        self._entered.append(id_)

    def leave(self, id_: str) -> None:
        """A stream has ended, or its client has gone."""
        if self.streams.pop(id_, None) is not None:
            self._ended.append(id_)

    def step(self, step: int, step_s: float) -> None:
        """An event for each stream, and what is told of the step."""
        event = _chunk(_EVENT % time.monotonic_ns())
        for id_, connection in list(self.streams.items()):
            if not connection.send(event):
                self.leave(id_)
        if self._publisher is not None:
            self._publish(self._publisher, step, step_s)

    def _publish(self, publisher: SnapshotPublisher, step: int, step_s: float) -> None:
        with publisher.lock:
            message = publisher.message
            message.step, message.step_s, message.time_s = step, step_s, time.time()
            message.scheduled_decode_tokens = len(self.streams)
            entered = [self._row(id_) for id_ in self._entered if id_ in self.streams]
            publisher.publish_changes(entered, self._ended, (), idle=False)
        publisher.poll()
        self._entered, self._ended = [], []

    def _row(self, id_: str) -> Row:
        return (id_, _PROMPT_TOKENS, self.streams[id_].sent, 0, 0, None)


class Connection(asyncio.Protocol):
    """One connection of a router; one request at a time.

    Attributes:
        sent: events of the present stream.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport
        self._paused = False
        self._left = self.sent = 0
        self._id = ""
        self._url = self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._worker.leave(self._id)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._url = self._body = b""
        self._id = ""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-request-id":
            self._id = f"chatcmpl-{value.decode()}"

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        path = self._url.partition(b"?")[0]
        if self._parser.get_method() != b"POST":
            self._transport.write(_OTHERS.get(path, _UNKNOWN))
        elif _STREAM.search(self._body):
            asked = _MAX_TOKENS.search(self._body)
            self._left, self.sent = int(asked[1]) if asked else 16, 0
            self._id = self._id or f"chatcmpl-{id(self)}"
            self._transport.write(_HEAD)
            self._worker.enter(self._id, self)
        else:
            self._transport.write(_COMPLETION)

    def send(self, event: bytes) -> bool:
        """Send an event if the other side reads; whether more are to come."""
        if self._paused:
            return True
        self._left -= 1
        self.sent += 1
        self._transport.write(event if self._left else event + _END)
        return self._left > 0


def _chunk(event: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(event), event)


def _every(loop: asyncio.AbstractEventLoop, period_s: float, call: Callable[[int], None]) -> None:
    """Call it again and again, with 1, 2, …; it catches up where it is late."""
    begin_s = loop.time()

    def turn(number: int) -> None:
        loop.call_at(begin_s + (number + 1) * period_s, turn, number + 1)
        call(number)

    loop.call_at(begin_s + period_s, turn, 1)


async def serve(options: argparse.Namespace) -> None:
    """Serve until SIGTERM."""
    loop = asyncio.get_running_loop()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    step_s = options.step_ms / 1000
    for number in range(options.workers):
        at = None if options.snapshots is None else options.snapshots + 2 * number
        endpoint = None if at is None else f"tcp://127.0.0.1:{at}"
        worker = Worker(number, options.slots, endpoint, context)
        await loop.create_server(
            lambda worker=worker: Connection(worker),  # type: ignore[misc]
            "127.0.0.1",
            options.port + number,
            backlog=4096,
        )
        steps = lambda step, worker=worker: worker.step(step, step_s)  # noqa: E731
        loop.call_later(step_s * number / options.workers, _every, loop, step_s, steps)
    ended = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    gc.freeze()
    await ended.wait()
    context.destroy(linger=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--snapshots", type=int)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--step-ms", type=float, default=20.0)
    uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
