"""Ray Serve's request router that asks ``evenstep pick`` for the replica of each request.

A deployment names a replica's engine in ``record_replica_metadata`` or ``record_routing_stats``, as
``{"evenstep": "10.0.0.7:8001"}`` (a list: several); else it is what the replica itself listens on
for Ray's HAProxy. Only Ray imports this module.
"""

import asyncio
import logging
import weakref
from functools import partial
from typing import Any

import aiohttp
from ray.exceptions import RayActorError
from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter
from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

from engine_patches.ray_serve.refused import RefusedError

log = logging.getLogger("ray.serve")

# A request may wait in the pool for as long as the picker lets it.
_PATIENCE = aiohttp.ClientTimeout(total=None, sock_connect=5.0)


class EvenstepRouter(PowerOfTwoChoicesRequestRouter):  # type: ignore[misc]
    """Completions go where the picker says, all else as Ray itself would have it.

    Ray's own queue is passed by: it would hold requests before the picker sees them, and give one
    the replica that was chosen for another.
    """

    def initialize_state(
        self, url: str, key: str = "", fall_back: bool = False, tell: str | None = None
    ) -> None:
        """Ray calls it with the ``request_router_kwargs``.

        Args:
            url: of the picker.
            key: an API key, if the picker checks them.
            fall_back: whether Ray chooses by its own rule where the picker cannot be reached.
            tell: keyword argument in which a replica's method gets the picker's answer.
        """
        self._url, self._fall_back, self._tell = url.rstrip("/"), fall_back, tell
        self._credentials = {"authorization": f"Bearer {key}"} if key else {}
        self._session: aiohttp.ClientSession | None = None
        self._engines: dict[str, RunningReplica] = {}
        self._others = False  # the picker has chosen an engine that is none of these
        self._given: set[str] = set()  # picks that no replica has accepted yet
        self._telling: set[asyncio.Task[None]] = set()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        self._engines = {at: replica for replica in replicas for at in _addresses(replica)}
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._engines = {at: r for at, r in self._engines.items() if r.replica_id != replica_id}

    async def choose_replicas(self, *args: Any, **kwargs: Any) -> list[list[RunningReplica]]:
        """Ray's own rule, for requests that are left to it."""
        if asyncio.current_task() not in self._routing_tasks:
            raise RuntimeError("EvenstepRouter: Ray tells no end of requests that it does not send")
        return list(await super().choose_replicas(*args, **kwargs))

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """What Ray asks for each request; again, if the replica did not take it."""
        if is_retry:
            self._forget(pending_request)
            await self._backoff(0)
        if (body := _completion(pending_request.args)) is not None:
            try:
                return await self._picked(pending_request, body)
            except (aiohttp.ClientError, TimeoutError) as error:
                why = f"{self._url} cannot be reached: {error!r}"
                if not self._fall_back:
                    raise RefusedError(503, why, 1.0) from error
                log.warning("evenstep: %s; Ray chooses a replica", why)
        return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)

    async def _picked(self, request: PendingRequest, body: dict[str, Any]) -> RunningReplica:
        headers = {"x-request-id": request.metadata.request_id}
        while True:
            while not self._engines:
                self._replicas_updated_event.clear()
                await self._replicas_updated_event.wait()
            if self._others:
                headers["x-gateway-destination-endpoint-subset"] = ",".join(self._engines)
            told = await self._post("/internal/route", body, headers)
            if (replica := self._engines.get(_joined(told["host"], told["port"]))) is not None:
                break
            # Its replica is not there yet, or no more, or of another deployment.
            self._others = True
            self._end(told["request_id"], asyncio.CancelledError())
        if self._tell is not None:
            request.kwargs[self._tell] = told
        request.evenstep = told["request_id"]
        self._given.add(request.evenstep)
        asyncio.current_task().add_done_callback(lambda _: self._forget(request))  # type: ignore[union-attr]
        return replica

    def _forget(self, request: PendingRequest) -> None:
        """Its pick is over, unless a replica has accepted it."""
        if (pick := getattr(request, "evenstep", "")) in self._given:
            self._given.remove(pick)
            request.kwargs.pop(self._tell, None)
            self._end(pick, asyncio.CancelledError())

    def on_request_routed(self, pending_request: Any, replica_id: ReplicaID, result: Any) -> None:
        """A replica has accepted a request; ``result`` calls back in a thread of Ray's."""
        if (pick := getattr(pending_request, "evenstep", "")) in self._given:
            self._given.remove(pick)
            loop = asyncio.get_running_loop()
            result.add_done_callback(lambda how: loop.call_soon_threadsafe(self._end, pick, how))

    def _end(self, pick: str, result: Any) -> None:
        # Of a dead replica and a cancelled call Ray gives the error, of what a replica raised none.
        died = isinstance(result, RayActorError)
        left = isinstance(result, BaseException) and not died
        body: dict[str, object] = {
            "request_id": pick,
            "status": 500 if died else 200,
            "client_left": left,
        }
        telling = asyncio.get_running_loop().create_task(self._tell_end(body))
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)

    async def _tell_end(self, body: dict[str, object]) -> None:
        try:
            await self._post("/internal/route/end", body, {})
        except (aiohttp.ClientError, TimeoutError, RefusedError) as error:
            log.warning("evenstep: an end could not be told: %s: %r", body, error)

    async def _post(self, path: str, body: object, headers: dict[str, str]) -> Any:
        if (session := self._session) is None:
            connector = aiohttp.TCPConnector(limit=0)  # each request that is held has its own
            self._session = session = aiohttp.ClientSession(connector=connector, timeout=_PATIENCE)
            loop = asyncio.get_running_loop()
            close = partial(loop.call_soon_threadsafe, lambda: loop.create_task(session.close()))
            weakref.finalize(self, close)
        headers |= self._credentials
        async with session.post(self._url + path, json=body, headers=headers) as answer:
            if answer.status >= 300:
                after = answer.headers.get("retry-after")
                raise RefusedError(answer.status, await answer.text(), after and float(after))
            return await answer.json() if answer.status == 200 else None


def _addresses(replica: RunningReplica) -> list[str]:
    told = replica.routing_stats.get("evenstep") or replica.replica_metadata.get("evenstep")
    if told is None and (there := replica.backend_http_endpoint) is not None:
        told = _joined(*there)
    return [told] if isinstance(told, str) else list(told or ())


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _completion(args: list[Any]) -> dict[str, Any] | None:
    """The body of a request for a completion: a dict or a Pydantic model."""
    body: Any = args[0] if args else None
    if hasattr(body, "model_dump"):
        body = body.model_dump(mode="json", exclude_none=True)
    return body if isinstance(body, dict) and body.keys() & {"prompt", "messages"} else None
