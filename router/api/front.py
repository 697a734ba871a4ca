"""The clients' port outside its routes: shutdown, log lines, names, keys, and errors as answers."""

import asyncio
from dataclasses import dataclass
from typing import cast

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.access.door import Door
from router.core.errors import EvenstepError, InvalidRequestError, NotLeadingError
from router.http.port import Lifecycle
from router.http.refusal import error_body
from router.proxy.answers import ENDING, Answer, error_answer, header, send_answer
from router.proxy.client_request import HEADER, head_of
from router.proxy.endpoints import dialect_of
from router.proxy.request_log import RequestLog

# Operators need these until the end.
_OPEN_TO_THE_END = frozenset({"/health", "/ready", "/metrics"})


@dataclass(slots=True)
class Front:
    """Outermost ASGI application; without a door no key is needed."""

    _app: ASGIApp
    _lifecycle: Lifecycle
    _requests: RequestLog
    _door: Door | None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        line, head = self._requests.begin(scope), head_of(scope)

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                line.status, line.request_id = message["status"], head.name
                if not header(message["headers"], HEADER):
                    message = {**message, "headers": [*message["headers"], head.header]}
            await send(message)

        try:
            if self._lifecycle.closed and scope["path"] not in _OPEN_TO_THE_END:
                raise NotLeadingError(ENDING)
            await self._enter(scope, receive, named)
        except EvenstepError as error:
            await _refuse(scope, named, error)
        except asyncio.CancelledError:  # the server's shutdown timeout is over
            if line.status is None:
                await _refuse(scope, named, NotLeadingError(ENDING))
        finally:
            self._requests.end(scope)

    async def _enter(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._door is None:
            await self._app(scope, receive, send)
            return
        key = self._door.enter(scope)
        try:
            await self._app(scope, receive, send)
        finally:
            self._door.leave(key)


async def _refuse(scope: Scope, send: Send, error: EvenstepError) -> None:
    await send_answer(send, dialect_of(scope["path"]).error(error_answer(error)))


_KINDS = {
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    409: "ConflictError",
}


def add_error_handlers(app: FastAPI) -> None:
    """Answer every error of a route in OpenAI's form."""

    async def on_error(request: Request, error: Exception) -> Response:
        answer = error_answer(cast(EvenstepError, error))
        answer = dialect_of(request.url.path).error(answer)
        headers = {name.decode(): value.decode() for name, value in answer.headers}
        return Response(answer.body, answer.status, headers)

    async def on_http_error(request: Request, error: Exception) -> Response:
        error = cast(HTTPException, error)
        kind = _KINDS.get(error.status_code, "HTTPError")
        answer = Answer(error.status_code, error_body(error.detail, kind, error.status_code))
        body = dialect_of(request.url.path).error(answer).body
        headers = {**(error.headers or {}), "content-type": "application/json"}
        return Response(body, error.status_code, headers)

    async def on_wrong_value(request: Request, error: Exception) -> Response:
        wrong = cast(RequestValidationError, error).errors()[0]
        name = str(wrong["loc"][-1])
        return await on_error(request, InvalidRequestError(f"{name}: {wrong['msg']}", param=name))

    async def on_failure(request: Request, _: Exception) -> Response:
        body = error_body("internal error", "InternalServerError", 500)
        name, value = head_of(request.scope).header
        headers = {"content-type": "application/json", name.decode(): value.decode()}
        return Response(body, 500, headers)

    async def on_client_left(_: Request, __: Exception) -> Response:
        return Response(status_code=400)  # never sent: the client left during its request

    app.add_exception_handler(EvenstepError, on_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_wrong_value)
    app.add_exception_handler(ClientDisconnect, on_client_left)
    app.add_exception_handler(Exception, on_failure)
