from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from router.access.door import Door
from router.core.errors import EvenstepError
from router.proxy.answers import error_answer, send_answer
from router.proxy.endpoints import dialect_of


class KeyGuard:
    """ASGI middleware that checks API keys."""

    def __init__(self, app: ASGIApp, door: Door) -> None:
        self._app = app
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            key = self._door.enter(scope)
        except EvenstepError as error:
            answer = dialect_of(scope["path"]).error(error_answer(error))
            await send_answer(send, answer)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            self._door.leave(key)
