"""Routes for operators: settings, recordings, and the health of what is observed."""

import asyncio
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse

from router.admin.admin_guard import audited, own_pages_only
from router.admin.status_page import Stream, Streams, streamed
from router.config.live import Reload
from router.core.errors import ConfigError, InvalidRequestError
from router.core.state.cluster import Cluster
from router.core.state.worker import Worker
from router.recording.recorder import ROOM_BYTES, Listener, Recorder

# These are changed elsewhere: in files, and at /workers.
_ELSEWHERE = frozenset({"workers", "tls_cert", "tls_key", "api_key_file", "admin_key_file"})

# Of recordings.
_LONGEST_S = 3600
_PAUSE_S = 0.25
# Chunks that may wait for a reader; the last chunk has its own place.
_ROOM = 4

Seconds = Annotated[float, Query(gt=0, le=_LONGEST_S)]


def add_settings(app: FastAPI, reload: Reload) -> None:
    """Add ``/settings``."""
    routes = APIRouter(prefix="/settings", dependencies=[Depends(own_pages_only)])

    @routes.get("")
    async def settings() -> dict[str, Any]:
        """Those that can be changed, as they are."""
        return _shown(reload)

    @routes.patch("")
    async def change(request: Request) -> dict[str, Any]:
        """Some of them, as JSON; until the next start, or until their configuration is another."""
        try:
            values = msgspec.json.decode(await request.body(), type=dict[str, Any])
        except ValueError as error:
            raise InvalidRequestError(f"not a JSON object of settings: {error}") from None
        with audited(request, f"change settings {values}"):
            for name in sorted(values.keys() & _ELSEWHERE):
                raise ConfigError(f"{name} cannot be changed here, but where it is read")
            await reload.change(values)
        return _shown(reload)

    app.include_router(routes)


def _shown(reload: Reload) -> dict[str, Any]:
    return reload.settings.model_dump(mode="json", include=set(reload.names - _ELSEWHERE))


def add_recording(
    app: FastAPI, recorder: Recorder, streams: Streams, room_bytes: int = ROOM_BYTES
) -> None:
    """Add ``GET /recording``; beyond ``room_bytes`` lines for a slow reader are dropped."""
    tasks: set[asyncio.Task[None]] = set()

    @app.get("/recording")
    async def recording(seconds: Seconds = 60.0) -> Response:
        """Steps and requests from now on, without texts, as --record writes them."""
        stream = streams.open(_ROOM + 1)
        listener = recorder.listen(room_bytes)
        task = asyncio.create_task(_pass_on(listener, stream, seconds))
        task.add_done_callback(lambda _: recorder.leave(listener))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return streamed(stream, "application/x-ndjson")


async def _pass_on(listener: Listener, stream: Stream, seconds: float) -> None:
    clock = asyncio.get_running_loop().time
    end_s = clock() + seconds
    while stream.open and clock() < end_s:
        if stream.waiting < _ROOM and (lines := listener.take()):
            stream.send(lines)
        await asyncio.sleep(min(_PAUSE_S, max(0.0, end_s - clock())))
    stream.send(listener.take())
    stream.close()


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
                group.name: [_health(each, problem) for each in group.workers.values()]
                for group in groups
            },
        }
        return JSONResponse(body, status_code=200 if up else 503)


def _health(worker: Worker, problem: Callable[[str], str | None]) -> dict[str, Any]:
    feed = worker.feed
    return {
        "id": worker.spec.id,
        "up": worker.live,
        "down_reason": worker.down_reason,
        "snapshots_problem": problem(worker.spec.id),
        "unreported": worker.unreported,
        "step": feed.last.step if feed else None,
        "load_tokens": worker.load_tokens,
        "running": feed.running if feed else None,
        "waiting": feed.waiting if feed else None,
    }
