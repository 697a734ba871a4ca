"""``GET /health`` of a process that observes but does not route."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse

from router.core.state.cluster import Cluster
from router.core.state.worker import Worker


def add_health(app: FastAPI, cluster: Cluster, problem: Callable[[str], str | None]) -> None:
    """Add ``GET /health``."""

    @app.get("/health")
    async def health() -> JSONResponse:
        """200 while some worker tells its steps, else 503; each worker either way."""
        groups = cluster.groups.values()
        up = any(group.live_workers() for group in groups)
        body = {
            "status": "ok" if up else "unavailable",
            "groups": {
                group.name: [_described(worker, problem) for worker in group.workers.values()]
                for group in groups
            },
        }
        return JSONResponse(body, status_code=200 if up else 503)


def _described(worker: Worker, problem: Callable[[str], str | None]) -> dict[str, Any]:
    feed = worker.feed
    return {
        "id": worker.spec.id,
        "up": worker.live,
        "down_reason": worker.down_reason,
        "snapshots_problem": problem(worker.spec.id),
        "step": feed.step if feed else None,
        "load_tokens": worker.load_tokens,
        "running": feed.running if feed else None,
        "waiting": feed.waiting if feed else None,
    }
