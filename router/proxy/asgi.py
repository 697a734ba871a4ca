"""The endpoints that generate as routes of the application (``--data-plane asgi``)."""

from __future__ import annotations

from functools import partial
from typing import cast

from fastapi import FastAPI, Request, Response
from starlette.routing import Route

from router.proxy.asgi_client import read_body, serve
from router.proxy.context import ServingContext
from router.proxy.generation import ENDPOINTS, relay_of


def add_generation(app: FastAPI, context: ServingContext) -> None:
    """Give an application these endpoints."""
    answer = partial(_generate, context)
    for path in ENDPOINTS:
        app.router.routes.append(Route(path, answer, methods=["POST"]))


async def _generate(context: ServingContext, request: Request) -> Response:
    relay = await relay_of(context, request.scope, await read_body(request))
    # Starlette only calls what it is given as an ASGI application, which this is.
    return cast(Response, partial(serve, relay))
