import asyncio
import contextlib
from collections.abc import Iterable
from io import BytesIO

from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from router.proxy.answers import Answer, Header, framed
from router.proxy.context import Serves, Source

# Bytes queued for the client before the source is paused.
_HIGH_WATER_BYTES = 64 * 1024


async def read_body(request: Request) -> bytes:
    """A request's body without a second copy in memory; ClientDisconnect if the client left."""
    read = BytesIO()
    async for piece in request.stream():
        read.write(piece)
    return read.getvalue()


async def serve(relay: Serves, _: Scope, receive: Receive, send: Send) -> None:
    """Serve a request; cancel it as soon as the client leaves."""
    client = _Client()
    serving = asyncio.create_task(relay.serve(client))
    leaving = asyncio.create_task(client_left(receive))
    serving.add_done_callback(client.wake)
    leaving.add_done_callback(client.leave)
    try:
        while not (serving.done() or client.gone):
            await client.pass_on(send)
    except asyncio.CancelledError:  # the server's shutdown timeout is over
        serving.cancel()
        await asyncio.wait((serving,))
    finally:
        leaving.cancel()
        await cancelled(serving)
    await client.flush(send)


class _Client:
    """Adapter to a relay's ``Client``; queues messages: ASGI's ``send`` may block."""

    def __init__(self) -> None:
        self.gone = False
        self._messages: list[Message] = []
        self._waiting_bytes = 0
        self._source: Source | None = None
        self._news = asyncio.Event()

    def answer(self, answer: Answer) -> None:
        self._begin(answer.status, framed(answer))
        self.finish(answer.body)

    def begin(self, status: int, headers: Iterable[Header], source: Source) -> None:
        self._source = source
        self._begin(status, headers)

    def send(self, piece: bytes) -> None:
        self._say({"type": "http.response.body", "body": piece, "more_body": True})
        self._waiting_bytes += len(piece)
        if self._source is not None and self._waiting_bytes > _HIGH_WATER_BYTES:
            self._source.pause()

    def finish(self, piece: bytes = b"") -> None:
        self._say({"type": "http.response.body", "body": piece})

    def wake(self, _: asyncio.Future[None]) -> None:
        self._news.set()

    def leave(self, _: asyncio.Future[None]) -> None:
        self.gone = True
        self._news.set()

    async def pass_on(self, send: Send) -> None:
        await self._news.wait()
        self._news.clear()
        await self.flush(send)
        if self._source is not None and not self._messages:
            self._source.resume()

    async def flush(self, send: Send) -> None:
        messages, self._messages, self._waiting_bytes = self._messages, [], 0
        for message in messages:
            await send(message)

    def _begin(self, status: int, headers: Iterable[Header]) -> None:
        self._say({"type": "http.response.start", "status": status, "headers": list(headers)})

    def _say(self, message: Message) -> None:
        self._messages.append(message)
        self._news.set()


async def client_left(receive: Receive) -> None:
    """The client has left or has its whole answer; its body was read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancelled(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait for its end; raises an earlier error of it."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
