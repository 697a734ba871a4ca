"""The admin port: what operators look at, apart from what clients ask.

Whoever serves it chooses its routes: each ``add_…`` function takes the application and what its
routes need, and so ``evenstep serve`` and ``evenstep observe`` share them.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from fastapi import FastAPI, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from router.access.files import KeySource
from router.admin.hosts import LocalOnly
from router.admin.login import KeyedOnly
from router.decider import Decider
from router.openapi import add_description
from router.policies.instances import to_json
from router.proxy.error_handlers import add_error_handlers

AddRoutes = Callable[[FastAPI], None]
Render = Callable[[], Awaitable[bytes]]


def create_admin(routes: Iterable[AddRoutes], keys: KeySource | None = None) -> ASGIApp:
    """The application of the admin port.

    Args:
        routes: each adds some, as in ``functools.partial(add_metrics, render=metrics.render)``.
        keys: one of these opens it; None: it answers to this machine alone.
    """
    app = FastAPI(
        title="Evenstep admin",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    for add in routes:
        add(app)
    add_error_handlers(app)
    add_description(app)
    return LocalOnly(app) if keys is None else KeyedOnly(app, keys, time.monotonic)


def add_metrics(app: FastAPI, render: Render) -> None:
    """``GET /metrics``."""

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(await render(), media_type="text/plain; version=0.0.4; charset=utf-8")


def add_instance(app: FastAPI, deciders: Mapping[str, Decider]) -> None:
    """``GET /debug/instance``."""

    @app.get("/debug/instance")
    async def instance(group: str = "default") -> dict[str, Any]:
        """The integer program that bfio solved in a group's last round, for `evenstep solve`."""
        decider = deciders.get(group)
        if decider is None or decider.solved is None:
            raise HTTPException(404, f"bfio solved nothing in the last round of group {group!r}")
        return to_json(decider.solved.instance)
