"""``GET /health`` of a process that observes but does not route."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse

from router.core.clock import Clock
from router.core.state.cluster import Cluster
from router.core.state.worker_status import WorkerStatus, status_of


def add_health(
    app: FastAPI, cluster: Cluster, clock: Clock, problem: Callable[[str], str | None]
) -> None:
    """Add ``GET /health``."""

    @app.get("/health")
    async def health() -> JSONResponse:
        """200 while some worker tells its steps, else 503; each worker either way."""
        groups, now_s = cluster.groups.values(), clock()
        up = any(group.live_workers() for group in groups)
        body = {
            "status": "ok" if up else "unavailable",
            "groups": {
                group.name: [
                    _described(status_of(worker, now_s), problem(worker.spec.id))
                    for worker in group.workers.values()
                ]
                for group in groups
            },
        }
        return JSONResponse(body, status_code=200 if up else 503)


def _described(status: WorkerStatus, problem: str | None) -> dict[str, Any]:
    return {
        "id": status.spec.id,
        "up": status.up,
        "down_reason": status.down_reason,
        "snapshots_problem": problem,
        "step": status.step,
        "load_tokens": status.load_tokens,
        "running": status.running,
        "waiting": status.waiting,
    }
