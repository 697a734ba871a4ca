"""Requests that the deciding process serves itself: a proxy forwards them whole and unchanged."""

import asyncio
import contextlib
from functools import partial

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from router.access.door import SHOWN
from router.core.errors import EvenstepError, UpstreamError
from router.engines.http_client import HttpClient, Response
from router.processes.remote_dispatcher import RemoteDispatcher, deserted
from router.proxy.answers import (
    Answer,
    error_answer,
    header,
    headers_down,
    headers_on,
    streams,
    told_in_stream,
)
from router.proxy.asgi_client import cancelled, read_body, serve
from router.proxy.client_request import head_of
from router.proxy.context import Client
from router.proxy.endpoints import dialect_of
from router.proxy.request_log import pass_on

# For the last bytes of the deciding process, which ends at the same time.
_LAST_WORD_S = 1.0
# Long enough to notice that the deciding process is gone, before its successor is up.
_LOOK_S = 0.2
_URL = "http://evenstep"


class Whole:
    """Serves one request through the deciding process's HTTP application."""

    def __init__(
        self, client: HttpClient, decider: RemoteDispatcher, scope: Scope, body: bytes
    ) -> None:
        self._upstream = client
        self._decider = decider
        self._scope = scope
        self._body = body
        self._headed = False
        pass_on(scope)

    async def serve(self, client: Client) -> None:
        passing = asyncio.create_task(self._pass(client))
        try:
            await asyncio.wait((passing,))
        except asyncio.CancelledError:
            if client.gone:
                raise
            await asyncio.wait((passing,), timeout=_LAST_WORD_S)
        finally:
            await cancelled(passing)

    async def _pass(self, client: Client) -> None:
        dialect = dialect_of(self._scope["path"])
        try:
            with contextlib.closing(await self._ask()) as response:
                await self._answer(response, client)
        except EvenstepError as error:
            if self._headed:
                client.finish(dialect.error_event(*told_in_stream(error), 0))
            else:
                pass_on(self._scope, elsewhere=False)
                client.answer(dialect.error(error_answer(deserted())))

    async def _ask(self) -> Response:
        """If the process dies before answering, ask its successor once."""
        await self._decider.back()
        try:
            return await self._request()
        except UpstreamError:
            await asyncio.sleep(_LOOK_S)
            if self._decider.here:
                raise
        await self._decider.back()
        return await self._request()

    async def _request(self) -> Response:
        asking = asyncio.create_task(self._asked())
        gone = asyncio.create_task(self._decider.gone())
        try:
            await asyncio.wait((asking, gone), return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise deserted()
            return asking.result()
        except BaseException:
            if not asking.cancel() and not asking.cancelled() and asking.exception() is None:
                asking.result().close()  # it arrived in the very turn of the cancellation
            raise
        finally:
            gone.cancel()

    async def _asked(self) -> Response:
        scope = self._scope
        headers = headers_on((*scope["headers"], *scope.get(SHOWN, ())), head_of(scope).header)
        path, query = scope["raw_path"].decode("latin-1"), scope["query_string"].decode("latin-1")
        target = f"{path}?{query}" if query else path
        return await self._upstream.request(scope["method"], _URL, target, headers, self._body)

    async def _answer(self, response: Response, client: Client) -> None:
        headers = headers_down(response.headers)
        length = header(response.headers, b"content-length")
        if self._scope["method"] == "HEAD":
            sizes = [(b"content-length", length)] if length else []
            client.begin(response.status, (*headers, *sizes), response)
            client.finish()
        elif length or not streams(headers):
            client.answer(Answer(response.status, await response.read(), tuple(headers)))
        else:
            self._headed = True
            client.begin(response.status, headers, response)
            await response.pour(client.send)
            client.finish()


class Forward:
    """ASGI application that forwards everything."""

    def __init__(self, client: HttpClient, decider: RemoteDispatcher) -> None:
        self._whole = partial(Whole, client, decider)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(Request(scope, receive))
        except ClientDisconnect:
            return
        await serve(self._whole(scope, body), scope, receive, send)
