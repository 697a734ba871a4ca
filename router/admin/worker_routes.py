"""Workers over the admin port: list, add, drain and remove them at run time."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.responses import JSONResponse

from router.admin.admin_guard import audited, own_pages_only
from router.admin.facts import shortcoming
from router.config.worker_notation import parse_worker
from router.core.errors import ConfigError, InvalidRequestError
from router.core.types import WorkerSpec
from router.dispatch.membership import Fleet, Member

_LONGEST_S = 3600.0

Wait = Annotated[float, Query(ge=0, le=_LONGEST_S)]


def add_workers(app: FastAPI, fleet: Fleet) -> None:
    """Add ``/workers``; every change is logged with its origin."""
    routes = APIRouter(prefix="/workers", dependencies=[Depends(own_pages_only)])

    @routes.get("")
    async def workers() -> dict[str, Any]:
        """All workers, and how they are."""
        return _shown(fleet.members)

    @routes.post("")
    async def add(request: Request) -> JSONResponse:
        """One more: a table as in the configuration file, as JSON; or a text as after --worker."""
        spec = _read(await request.body())
        with audited(request, f"add worker {spec.id}"):
            fleet.add(spec)
        member = next(each for each in reversed(fleet.members) if each.spec == spec)
        waits = member.state == "joining"
        return JSONResponse(_described(member), status_code=202 if waits else 201)

    @routes.delete("/{worker_id:path}")
    async def remove(
        request: Request,
        worker_id: str,
        drain: bool = False,
        force: bool = False,
        wait_s: Wait = 0.0,
    ) -> JSONResponse:
        """Have one go, and those in lockstep with it."""
        how = " by force" if force else ", drained" if drain else ""
        with audited(request, f"remove worker {worker_id}{how}"):
            going = fleet.remove(worker_id, drain=drain, force=force)
        return await _concerned(fleet, going, wait_s)

    def concern(*, draining: bool) -> Callable[..., Awaitable[JSONResponse]]:
        async def change(request: Request, worker_id: str, wait_s: Wait = 0.0) -> JSONResponse:
            with audited(request, f"{'drain' if draining else 'undrain'} worker {worker_id}"):
                concerned = fleet.drain(worker_id, draining=draining)
            return await _concerned(fleet, concerned, wait_s if draining else 0.0)

        return change

    for action, draining in (("drain", True), ("undrain", False)):
        routes.post("/{worker_id:path}/" + action)(concern(draining=draining))
    app.include_router(routes)


async def _concerned(fleet: Fleet, worker_ids: Sequence[str], wait_s: float) -> JSONResponse:
    """The state of these workers after a wait: 200 when they are idle, else 202."""
    done = await fleet.empty(worker_ids, wait_s)
    fleet.settle()
    left = [member for member in fleet.members if member.spec.id in worker_ids]
    gone = sorted(set(worker_ids) - {member.spec.id for member in left})
    return JSONResponse({**_shown(left), "removed": gone}, status_code=200 if done else 202)


def _read(body: bytes) -> WorkerSpec:
    text = body.strip()
    try:
        return parse_worker(
            msgspec.json.decode(text) if text[:1] in (b"{", b'"') else text.decode()
        )
    except ConfigError as error:
        raise InvalidRequestError(str(error)) from None
    except ValueError as error:  # includes msgspec's and Unicode's errors
        raise InvalidRequestError(f"neither JSON nor a text: {error}") from None


def _shown(members: Sequence[Member]) -> dict[str, Any]:
    return {"workers": [_described(member) for member in members]}


def _described(member: Member) -> dict[str, Any]:
    spec = {key: value for key, value in asdict(member.spec).items() if key != "server_key"}
    worker = member.worker
    return {
        **spec,
        "state": member.state,
        "reason": worker.down_reason or shortcoming(worker) if worker else None,
        "requests": worker.in_flight + worker.aside if worker else 0,
        "slots": worker.slots if worker else member.spec.slots,
        "estimated_service_rate": worker.service.known_per_s if worker else None,
    }
