"""Routes on both the clients' port and the admin port."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import FastAPI, Response
from starlette.exceptions import HTTPException

from router.core.policies.bfio.instances import to_json
from router.core.rounds.decider import Decider


def add_metrics(app: FastAPI, render: Callable[[], Awaitable[bytes]]) -> None:
    """Add ``GET /metrics``."""

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(await render(), media_type="text/plain; version=0.0.4; charset=utf-8")


def add_instance(app: FastAPI, deciders: Mapping[str, Decider]) -> None:
    """Add ``GET /debug/instance``."""

    @app.get("/debug/instance")
    async def instance(group: str = "default") -> dict[str, Any]:
        """The integer program that bfio solved in a group's last round, for `evenstep solve`."""
        decider = deciders.get(group)
        if decider is None or decider.solved is None:
            raise HTTPException(404, f"bfio solved nothing in the last round of group {group!r}")
        return to_json(decider.solved.instance)
