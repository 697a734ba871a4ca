"""Who may ask, before an ASGI application: who is not let in gets an answer of the router's own."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from router.access.door import Door
from router.errors import EvenstepError
from router.proxy.answers import error_answer, send_answer
from router.proxy.generation import dialect_of


class KeyGuard:
    """An ASGI application around another one.

    Args:
        app: what is guarded.
        door: lets in who may ask.
    """

    def __init__(self, app: ASGIApp, door: Door) -> None:
        self._app = app
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
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
