"""The engines' client and the scripted server that it speaks to."""

import asyncio

from router.engines.http_client import Headers, HttpClient, Response
from tests.support.scripted import ScriptedServer, head, soon

KIND = "application/json"
OK = head(200, KIND, content_length="2")
CHUNKED = head(200, KIND, transfer_encoding="chunked")


class Peers:
    """A client and the server that it speaks to."""

    def __init__(self, client: HttpClient, server: ScriptedServer) -> None:
        self.client = client
        self.server = server

    def ask(self, body: bytes = b"?", headers: Headers = ()) -> asyncio.Task[Response]:
        return asyncio.create_task(
            self.client.request("POST", self.server.url, "/v1/completions", headers, body)
        )

    async def converse(self, *answer: bytes) -> Response:
        """The head of an answer that is sent in these parts, the connection staying open."""
        asked = self.ask()
        exchange = await self.server.next()
        await exchange.send(*answer)
        exchange.ended.set()
        return await soon(asked)

    async def whole(self, *answer: bytes) -> tuple[int, bytes]:
        response = await self.converse(*answer)
        return response.status, await soon(response.read())
