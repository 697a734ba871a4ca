"""A small streaming HTTP/1.1 client: keep-alive pools per engine, framing by httptools.

Bodies are handed on as they arrive, unparsed: to whoever iterates over an answer, or straight to a
sink, which costs no turn of the event loop. It exists because httpx as a streaming upstream costs
several times as much per token; the control plane uses httpx.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from urllib.parse import SplitResult, urlsplit

from router.engines.connection import Connection, Sink
from router.errors import UpstreamError

Headers = Sequence[tuple[bytes, bytes]]


class Response:
    """An engine's answer; iterate for its body, and close it in any case.

    Attributes:
        status: HTTP status.
        headers: as sent, names in the engine's spelling.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection: Connection | None = connection
        self.status = connection.status
        self.headers = list(connection.headers)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Body bytes as they arrive, transfer encoding removed.

        Raises:
            UpstreamError: the answer broke off.
        """
        while self._connection is not None:
            chunk = await self._connection.chunk()
            if chunk is None:
                self.close()
                return
            yield chunk

    async def pour(self, sink: Sink) -> None:
        """Hand the body to a sink as it comes, transfer encoding removed, a read's bytes at once.

        Args:
            sink: called from the event loop's callbacks; what it raises ends the answer.

        Raises:
            UpstreamError: the answer broke off.
        """
        if self._connection is not None:
            await self._connection.pour(sink)
            self.close()

    def divert(self, sink: Sink) -> None:
        """Pour what follows into another sink; called by the one before."""
        if self._connection is not None:
            self._connection.divert(sink)

    def pause(self) -> None:
        """Take no more of the body for now: whom it is poured to has enough."""
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        """Take it again."""
        if self._connection is not None:
            self._connection.resume()

    async def read(self) -> bytes:
        """The whole body.

        Raises:
            UpstreamError: the answer broke off.
        """
        return b"".join([chunk async for chunk in self])

    def take_heard(self) -> bool:
        """Whether bytes have come since this was asked before, or wait to be read."""
        connection = self._connection
        return connection is None or connection.take_heard()

    def break_off(self, error: UpstreamError) -> None:
        """Whoever reads the body gets this error instead of what has not come yet."""
        if self._connection is not None:
            self._connection.break_off(error)

    def close(self) -> None:
        """Give the connection back; before the end of the body this aborts the request."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.release()


class HttpClient:
    """Connections to any number of engines.

    Args:
        connect_timeout_s: bound on opening a connection.
        key: the engines' API key; None: they ask for none.
    """

    def __init__(self, connect_timeout_s: float = 2.0, key: str | None = None) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._credentials = bearer(key)
        self._idle: defaultdict[str, list[Connection]] = defaultdict(list)

    async def request(
        self, method: str, url: str, path: str, headers: Headers = (), body: bytes = b""
    ) -> Response:
        """Send a request and wait for the head of its answer.

        Args:
            method: HTTP method.
            url: base URL of the engine.
            path: target below it, with query.
            headers: without Host and Content-Length, which are set here.
            body: sent whole.

        Raises:
            UpstreamError: no connection, or no answer on it.
        """
        target = urlsplit(url)
        message = _encode(method, target, path, (*headers, *self._credentials), body)
        connection = self._reuse(url)
        if connection is not None:
            try:
                return await self._exchange(connection, message)
            except UpstreamError:
                if connection.heard:
                    raise  # else it was closed while idle: the request was never read
        return await self._exchange(await self._connect(url, target), message)

    async def aclose(self) -> None:
        """Close the idle connections."""
        for connections in self._idle.values():
            for connection in list(connections):
                connection.abort()
        self._idle.clear()

    def _reuse(self, url: str) -> Connection | None:
        idle = self._idle[url]
        while idle:
            connection = idle.pop()
            if not connection.closing:
                return connection
        return None

    async def _connect(self, url: str, target: SplitResult) -> Connection:
        secure = target.scheme == "https"
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(self._idle[url]),
                    target.hostname or "",
                    target.port or (443 if secure else 80),
                    ssl=ssl.create_default_context() if secure else None,
                )
        except (OSError, TimeoutError) as error:
            reason = str(error) or f"no connection within {self._connect_timeout_s:g} s"
            raise UpstreamError(f"cannot connect to {url}: {reason}") from error
        return connection

    async def _exchange(self, connection: Connection, message: bytes) -> Response:
        connection.send(message)
        try:
            await connection.head()
        except BaseException:
            connection.abort()
            raise
        return Response(connection)


def _encode(method: str, target: SplitResult, path: str, headers: Headers, body: bytes) -> bytes:
    lines = [
        f"{method} {target.path.rstrip('/')}{path} HTTP/1.1".encode("latin-1"),
        b"host: " + target.netloc.rpartition("@")[2].encode("latin-1"),
        *(name + b": " + value for name, value in headers),
        b"content-length: %d" % len(body),
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def bearer(key: str | None) -> Headers:
    """The header that shows a key, none where there is none."""
    return () if key is None else ((b"authorization", f"Bearer {key}".encode("ascii")),)
