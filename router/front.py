"""What stands before the application: the door at the end, and each request's line in the log."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.errors import NoWorkerError
from router.lifecycle import Lifecycle
from router.proxy.answers import error_answer, send_answer
from router.proxy.generation import dialect_of
from router.proxy.identity import read_identity
from router.request_log import RequestLine, RequestLog

# What an operator looks at until the very end.
_OPEN_TO_THE_END = frozenset({"/health", "/metrics"})


class Front:
    """An ASGI application around another one.

    Args:
        app: answers.
        lifecycle: whether new requests are served.
        requests: told of each request.
    """

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle, requests: RequestLog) -> None:
        self._app = app
        self._lifecycle = lifecycle
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or turn it away."""
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
        except asyncio.CancelledError:  # the server ends, and has waited long enough
            if line.status is None:
                await _turn_away(scope, noting)
        finally:
            self._requests.end(scope)


class _Noting:
    """Sends, and notes how the answer begins."""

    __slots__ = ("_line", "_send")

    def __init__(self, send: Send, line: RequestLine) -> None:
        self._send = send
        self._line = line

    def __call__(self, message: Message) -> Awaitable[None]:
        if self._line.status is None:
            self._line.begun(message["status"], message["headers"])
        return self._send(message)


async def _turn_away(scope: Scope, send: Send) -> None:
    answer = error_answer(NoWorkerError("the router is ending; retry"))
    answer = dialect_of(scope["path"]).error(answer)
    named = (*answer.headers, read_identity(scope["headers"]).header)
    await send_answer(send, replace(answer, headers=named))
