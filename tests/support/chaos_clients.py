"""Clients of a chaos run: HTTP on bare sockets, strict about how an answer ends, rude otherwise."""

import asyncio
import contextlib
import json
import socket
from dataclasses import dataclass, field
from typing import Any

import httptools

from tests.support.chaos_schedule import Ask

LIMIT_S = 60.0
"""No answer may take longer: whatever happens, it has an end."""
_SMALL_WINDOW = 2048
_PAUSE_S = 0.002


@dataclass(slots=True)
class Got:
    """What one client has received.

    Attributes:
        done: the answer has ended by HTTP's own rules.
        left: the client went away before that.
        refused: nobody listens, or nobody does any more: a new connection ended without a byte.
        trouble: what no answer may do, None for nothing.
    """

    ask: Ask
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    done: bool = False
    left: bool = False
    refused: bool = False
    trouble: str | None = None

    @property
    def whole_events(self) -> list[bytes]:
        """Events of a stream, without what is no whole one."""
        return bytes(self.body).split(b"\n\n")[:-1]

    @property
    def events(self) -> list[Any]:
        """The same parsed, the closing one as None."""
        texts = [event.removeprefix(b"data: ") for event in self.whole_events]
        return [None if text == b"[DONE]" else json.loads(text) for text in texts]


class _Reader:
    """httptools' callbacks for one answer."""

    def __init__(self, got: Got) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.keeps = False
        self._got = got

    def on_header(self, name: bytes, value: bytes) -> None:
        self._got.headers[name.decode().lower()] = value.decode()

    def on_headers_complete(self) -> None:
        self._got.status = self.parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self._got.body += data

    def on_message_complete(self) -> None:
        self._got.done = True
        self.keeps = self.parser.should_keep_alive()

    def on_message_begin(self) -> None:
        if self._got.done:
            self._got.trouble = "a second answer to one request"


class Caller:
    """One client after another on one connection, for as long as that can be kept.

    Args:
        port: of the router.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._socket: socket.socket | None = None

    async def call(self, ask: Ask) -> Got:
        """Ask, and read as the client would."""
        got = Got(ask)
        if ask.slow:
            self.close()
        kept = self._socket is not None
        try:
            async with asyncio.timeout(LIMIT_S):
                async with asyncio.timeout(ask.leaves_after_s):
                    await self._exchange(ask, got)
        except TimeoutError:
            self.close()
            if ask.leaves_after_s is None:
                got.trouble = f"no end in {LIMIT_S:g} s"
            got.left = True
        except OSError as error:
            got.refused = not kept and not got.status
            self.close()
            got.trouble = f"the connection failed: {error!r}"
        except httptools.HttpParserError as error:
            self.close()
            got.trouble = f"not HTTP: {error!r}"
        return got

    def close(self) -> None:
        """Leave."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def _exchange(self, ask: Ask, got: Got) -> None:
        loop = asyncio.get_running_loop()
        connection = self._socket or await self._connect(ask)
        self._socket = connection
        await loop.sock_sendall(connection, ask.message(f"127.0.0.1:{self._port}"))
        reader = _Reader(got)
        while not got.done:
            data = await loop.sock_recv(connection, 300 if ask.slow else 65536)
            if not data:
                got.trouble = "the connection ended before the answer"
                break
            reader.parser.feed_data(data)
            got.left = not got.done and len(got.whole_events) >= ask.leaves_after_events
            if got.left:
                break
            if ask.slow:
                await asyncio.sleep(_PAUSE_S)
        if got.left or ask.slow or not reader.keeps:
            self.close()

    async def _connect(self, ask: Ask) -> socket.socket:
        connection = socket.socket()
        connection.setblocking(False)
        if ask.slow:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_WINDOW)
        try:
            await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self._port))
        except BaseException:
            connection.close()
            raise
        return connection


@contextlib.contextmanager
def closing(callers: list[Caller]) -> Any:
    """End every connection after the block."""
    try:
        yield callers
    finally:
        for caller in callers:
            caller.close()
