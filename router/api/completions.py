from __future__ import annotations

from functools import partial
from typing import cast

from fastapi import FastAPI, Request, Response
from starlette.routing import Route

from router.proxy.asgi_client import read_body, serve
from router.proxy.context import ServingContext
from router.proxy.endpoints import ENDPOINTS, relay_of


def add_generation(app: FastAPI, context: ServingContext) -> None:
    """Add the endpoints that generate as ASGI routes (``--data-plane asgi``)."""
    answer = partial(_generate, context)
    for path in ENDPOINTS:
        app.router.routes.append(Route(path, answer, methods=["POST"]))


async def _generate(context: ServingContext, request: Request) -> Response:
    relay = await relay_of(context, request.scope, await read_body(request))
    # The object is an ASGI application, and Starlette only calls it.
    return cast(Response, partial(serve, relay))
