"""A small streaming HTTP/1.1 client: keep-alive pools per engine, framing by httptools.

Bodies go to an iterator, or to a sink, which costs no turn of the event loop. httpx costs several
times as much per token.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from urllib.parse import urlsplit

from router.core.errors import UnreachedError, UpstreamError
from router.engines.engine_connection import Connection, Sink
from router.engines.time_limit import time_limit
from router.file_limit import LACKS, descriptors_lacking, scarce

Headers = Sequence[tuple[bytes, bytes]]

# uvicorn, and with it vLLM, closes a connection that has been idle for 5 s. A request that crosses
# the close is lost, and its worker seems to be down.
_MOST_IDLE_S = 4.0


class Response:
    """An answer, always to be closed; ``framed``: HTTP marks its end, not the connection's end."""

    def __init__(self, connection: Connection) -> None:
        self._connection: Connection | None = connection
        self.status = connection.status
        self.headers = connection.headers
        self.framed = connection.framed

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Raises UpstreamError if the answer breaks off."""
        while self._connection is not None:
            chunk = await self._connection.chunk()
            if chunk is None:
                self.close()
                return
            yield chunk

    async def pour(self, sink: Sink) -> None:
        """One call per read, in the loop's callbacks; an exception of the sink ends the answer."""
        if self._connection is not None:
            await self._connection.pour(sink)
            self.close()

    def divert(self, sink: Sink) -> None:
        """Replace the sink, which calls this itself."""
        if self._connection is not None:
            self._connection.divert(sink)

    def pause(self) -> None:
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        if self._connection is not None:
            self._connection.resume()

    async def read(self) -> bytes:
        pieces: list[bytes] = []
        await self.pour(pieces.append)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def take_heard(self) -> bool:
        """Whether bytes arrived since the last call, or wait to be read."""
        connection = self._connection
        return connection is None or connection.take_heard()

    def break_off(self, error: UpstreamError) -> None:
        if self._connection is not None:
            self._connection.break_off(error)

    def close(self) -> None:
        """Return the connection; before the body's end this aborts the request."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.release()


class _Origin:
    def __init__(self, url: str) -> None:
        target = urlsplit(url)
        self.url = url
        self.secure = target.scheme == "https"
        self.address = target.hostname or "", target.port or (443 if self.secure else 80)
        self.idle: list[Connection] = []
        self._below = target.path.rstrip("/")
        self._host = b"host: " + target.netloc.rpartition("@")[2].encode("latin-1")

    def head(self, method: str, path: str, headers: Headers, body: bytes) -> bytes:
        lines = [f"{method} {self._below}{path} HTTP/1.1".encode("latin-1"), self._host]
        for name, value in headers:
            lines.append(name + b": " + value)
        lines.append(b"content-length: %d\r\n\r\n" % len(body))
        return b"\r\n".join(lines)

    def take(self) -> Connection | None:
        oldest_s = asyncio.get_running_loop().time() - _MOST_IDLE_S
        while self.idle:
            connection = self.idle.pop()
            if connection.idle_since_s < oldest_s:
                connection.abort()
            elif not connection.closing:
                return connection
        return None


class HttpClient:
    """Connections to engines, with their API ``key``; ``tls`` makes a context for each."""

    def __init__(
        self,
        connect_timeout_s: float = 2.0,
        key: str | None = None,
        tls: Callable[[], ssl.SSLContext] = ssl.create_default_context,
    ) -> None:
        self._tls = tls
        self._connect_timeout_s = connect_timeout_s
        self.credentials = bearer(key)
        self._origins: dict[str, _Origin] = {}

    async def request(
        self,
        method: str,
        url: str,
        path: str,
        headers: Headers = (),
        body: bytes = b"",
        check: Callable[[], object] = bool,
    ) -> Response:
        """Wait for an answer's head; Host and Content-Length are added to the headers.

        ``check`` may raise before anything is sent, also when a connection has been made.
        """
        origin = self._origins.get(url)
        if origin is None:
            origin = self._origins[url] = _Origin(url)
        head = origin.head(method, path, (*headers, *self.credentials), body)
        check()
        connection = origin.take()
        if connection is not None:
            try:
                await connection.ask(head, body)
            except UpstreamError:
                if not connection.unread:
                    raise  # the engine may have read it: a retry counts as an attempt
            else:
                return Response(connection)
        connection = await self._connect(origin)
        try:
            check()
        except BaseException:
            connection.abort()
            raise
        await connection.ask(head, body)
        return Response(connection)

    async def aclose(self) -> None:
        self._close_idle()
        self._origins.clear()

    def _close_idle(self) -> None:
        for origin in self._origins.values():
            for connection in list(origin.idle):
                connection.abort()

    async def _connect(self, origin: _Origin) -> Connection:
        try:
            async with time_limit(self._connect_timeout_s):
                loop, make = asyncio.get_running_loop(), partial(Connection, origin.idle)
                tls = self._tls() if origin.secure else None
                _, connection = await loop.create_connection(make, *origin.address, ssl=tls)
        except (OSError, TimeoutError) as error:
            if isinstance(error, OSError) and error.errno in LACKS:
                self._close_idle()
                raise descriptors_lacking() from error
            reason = str(error) or f"no connection within {self._connect_timeout_s:g} s"
            raise UnreachedError(f"cannot connect to {origin.url}: {reason}") from error
        if not connection.closing and scarce(connection.fileno, 1):
            connection.abort()
            self._close_idle()
            raise descriptors_lacking()
        return connection


def bearer(key: str | None) -> Headers:
    """The Authorization header."""
    return () if key is None else ((b"authorization", f"Bearer {key}".encode("ascii")),)
