from __future__ import annotations

from typing import cast

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from router.core.errors import EvenstepError, InvalidRequestError
from router.http.refusal import error_body
from router.proxy.answers import Answer, error_answer
from router.proxy.client_request import head_of
from router.proxy.endpoints import dialect_of

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
