"""Outer ASGI layer: refuses requests during shutdown, and logs each request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.core.errors import NoWorkerError
from router.http.port import Lifecycle
from router.proxy.answers import error_answer, header, send_answer
from router.proxy.client_request import HEADER, head_of
from router.proxy.endpoints import dialect_of
from router.proxy.request_log import RequestLine, RequestLog

# Operators need these until the end.
_OPEN_TO_THE_END = frozenset({"/health", "/metrics"})


class Front:
    """Outermost ASGI application."""

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle, requests: RequestLog) -> None:
        self._app = app
        self._lifecycle = lifecycle
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        line = self._requests.begin(scope)
        noting = _Noting(send, line)
        try:
            if self._lifecycle.closed and scope["path"] not in _OPEN_TO_THE_END:
                await _turn_away(scope, noting)
            else:
                await self._app(scope, receive, noting)
        except asyncio.CancelledError:  # the server's shutdown timeout is over
            if line.status is None:
                await _turn_away(scope, noting)
        finally:
            self._requests.end(scope)


class _Noting:
    """Sends messages and logs the answer's head."""

    __slots__ = ("_line", "_send")

    def __init__(self, send: Send, line: RequestLine) -> None:
        self._send = send
        self._line = line

    def __call__(self, message: Message) -> Awaitable[None]:
        if self._line.status is None:
            request_id = header(message["headers"], HEADER).decode("latin-1")
            self._line.begun(message["status"], request_id or None)
        return self._send(message)


async def _turn_away(scope: Scope, send: Send) -> None:
    answer = error_answer(NoWorkerError("the router is ending; retry"))
    answer = dialect_of(scope["path"]).error(answer)
    named = (*answer.headers, head_of(scope).header)
    await send_answer(send, replace(answer, headers=named))
