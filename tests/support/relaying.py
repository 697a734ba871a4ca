"""A router between a test's own clients and scripted engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.support.scripted import TIMEOUT_S, ScriptedServer, scripted
from tests.support.serving import Router, serving

One = tuple[Router, ScriptedServer]


class RawClient:
    """A client that sees the framing of an answer.

    Attributes:
        body: what has come of it.
    """

    def __init__(self, router: Router) -> None:
        self._port = router.port
        self.body = b""

    async def __aenter__(self) -> RawClient:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.transport.abort()

    async def post(self, length: int | None = None, **fields: Any) -> None:
        """Send a request, or only so many bytes of its body."""
        body = json.dumps({"model": "tiny", "prompt": [1, 2, 3], **fields}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        self.writer.write(head.encode() + body[:length])
        await self.writer.drain()

    async def read_until(self, text: bytes) -> None:
        """Read chunks until the body has this in it."""
        while text not in self.body:
            assert await self._chunk(), self.body

    async def read_to_end(self) -> bytes:
        """Read up to the terminating chunk; the body, and nothing comes behind it."""
        while await self._chunk():
            pass
        assert not self.reader._buffer  # type: ignore[attr-defined]
        return self.body

    async def _chunk(self) -> bytes:
        async with asyncio.timeout(TIMEOUT_S):
            if not self.body:
                head = await self.reader.readuntil(b"\r\n\r\n")
                assert b"transfer-encoding: chunked" in head.lower(), head
            size = int(await self.reader.readuntil(b"\r\n"), 16)
            chunk = (await self.reader.readexactly(size + 2))[:-2]
        self.body += chunk
        return chunk


@asynccontextmanager
async def routed(
    engines: int = 1, **settings: Any
) -> AsyncIterator[tuple[Router, list[ScriptedServer]]]:
    async with scripted(engines) as servers, serving(servers, **settings) as router:
        yield router, servers
