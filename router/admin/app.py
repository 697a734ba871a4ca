"""The admin port: routes for operators, separate from those for clients.

Each ``add_…`` function adds routes to the application, given their dependencies. ``evenstep serve``
and ``evenstep observe`` share them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from fastapi import FastAPI
from starlette.types import ASGIApp

from router.access.key_files import KeySource
from router.admin.hosts import LocalOnly
from router.admin.login import KeyedOnly
from router.api.error_handlers import add_error_handlers
from router.api.openapi import add_description

AddRoutes = Callable[[FastAPI], None]


def create_admin(routes: Iterable[AddRoutes], keys: KeySource | None = None) -> ASGIApp:
    """Build the application of the admin port.

    Args:
        routes: functions that add routes, as ``functools.partial(add_metrics,
            render=metrics.render)``.
        keys: keys to the port; None: it serves this machine only.
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
