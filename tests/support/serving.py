"""The router's HTTP side in the test's own event loop, before scripted engines."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
from uvicorn.server import ServerState

from router.access.door import Door
from router.api.app import AppContext, create_app
from router.api.front import Front
from router.config.setting_sources import load_settings
from router.core.clock import Clock
from router.core.events import WorkerDown, WorkerUp
from router.core.policies.baselines import PerRequest, fcfs
from router.core.queue.retry import Deadlines
from router.core.state.breaker import DEFAULTS, BreakerSettings
from router.core.state.cluster import Cluster
from router.core.state.worker import Worker
from router.core.stats import GroupStats
from router.core.types import Outcome, WorkerSpec
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.interface import Deciding
from router.dispatch.models import ModelTable
from router.engines.http_client import HttpClient, Response
from router.http.listening import server_config
from router.http.port import DataPlane, HttpLimits, Lifecycle
from router.pick.picks import Picks
from router.proxy.attempts import Attempts
from router.proxy.context import RelayContext, RelaySettings
from router.proxy.kv_transfer import Bootstraps, KvTransfer
from router.proxy.request_log import RequestLog
from router.proxy.splice import HotPath
from tests.support.dispatching import dispatch_settings
from tests.support.scripted import TIMEOUT_S, ScriptedServer, until

MODEL = "tiny"
LIMITS = HttpLimits()


class SpyClient(HttpClient):
    """Remembers its answers."""

    def __init__(self, key: str | None = None) -> None:
        super().__init__(TIMEOUT_S, key)
        self.answers: list[Response] = []

    async def request(self, *arguments: Any, **fields: Any) -> Response:
        self.answers.append(await super().request(*arguments, **fields))
        return self.answers[-1]


@dataclass(frozen=True, slots=True)
class Router:
    """A router that serves, its workers called a, b, c …

    Attributes:
        http: a client of the router.
        upstream: the router's own client.
        troubles: workers that were reported.
        attempts: those under way.
        tasks: of the server, one for each answer that is not complete.
        connections: of clients.
        picks: of gateways, if they may ask.
    """

    url: str
    http: httpx.AsyncClient
    dispatcher: Dispatcher
    upstream: SpyClient
    troubles: list[str]
    attempts: Attempts
    tasks: set[asyncio.Task[None]]
    connections: set[Any]
    picks: Picks

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def stats(self) -> GroupStats:
        return self.dispatcher.deciders["default"].stats

    @property
    def workers(self) -> list[Worker]:
        groups = self.dispatcher.cluster.groups.values()
        return [worker for group in groups for worker in group.workers.values()]

    @property
    def waiting(self) -> int:
        return sum(len(decider.pool) for decider in self.dispatcher.deciders.values())

    @property
    def in_flight(self) -> int:
        return sum(worker.in_flight for worker in self.workers)

    @property
    def outcomes(self) -> dict[Outcome, int]:
        return dict(self.stats.outcomes)

    def free_slots(self, worker: str = "a") -> int:
        return self.dispatcher.cluster.worker(worker).free_slots

    def down(self, worker: str) -> None:
        self.dispatcher.apply(WorkerDown(worker, "gone"))

    def post(
        self,
        path: str = "/v1/completions",
        headers: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> asyncio.Task[httpx.Response]:
        """A completion request, its answer to be read whole."""
        body = json.dumps({"model": MODEL, "prompt": [1, 2, 3], **fields}).encode()
        return asyncio.create_task(self.http.post(path, content=body, headers=headers))

    async def settled(self) -> None:
        """Wait until nothing waits and nothing runs, and see that nothing is counted still."""
        await until(lambda: not self.waiting and not self.in_flight)
        for worker in self.workers:
            assert (worker.free_slots, worker.load_tokens) == (worker.slots, 0)


@dataclass(slots=True)
class _Context:
    """The dependencies of the routes, without metrics and snapshots."""

    dispatcher: Dispatcher
    models: ModelTable
    relay: RelayContext
    door: Door | None
    clock: Clock = time.monotonic
    lifecycle: Lifecycle = field(default_factory=lambda: Lifecycle(0.0, 30.0))

    async def metrics(self) -> bytes:
        return b"metric 1\n"

    def problem(self, _: str) -> None:
        return None


@contextlib.asynccontextmanager
async def serving(
    engines: Sequence[ScriptedServer],
    slots: int = 2,
    max_attempts: int = 3,
    prefills: int = 0,
    kept_s: float | None = None,
    bootstrap: str | None = None,
    limits: HttpLimits = LIMITS,
    aliases: Mapping[str, str] | None = None,
    door: Door | None = None,
    engine_key: str | None = None,
    tells_key: bool = True,
    deadlines: Deadlines | None = None,
    breakers: BreakerSettings = DEFAULTS,
    plane: DataPlane | None = None,
    client_ranks: bool = False,
    groups: Sequence[str] = (),
    **settings: Any,
) -> AsyncIterator[Router]:
    """A router before these engines until the block ends; ``settings`` of the dispatch loop.

    The first ``prefills`` of them compute prompts, and keep the KV for ``kept_s``; ``bootstrap`` is
    their bootstrap server. ``door`` lets clients in; ``engine_key`` is shown to the
    engines, and with ``tells_key`` told to gateways. Without a ``plane`` it is that of ``evenstep
    serve`` in this environment. ``groups``: of each engine, if there are several.
    """
    specs = _specs(engines, slots, prefills, bootstrap)
    if groups:
        specs = [replace(spec, group=name) for spec, name in zip(specs, groups, strict=True)]
    cluster = Cluster(specs, breakers=breakers)
    dispatcher = Dispatcher(
        cluster,
        Deciding(lambda: PerRequest(fcfs), lambda: PerRequest(fcfs)),
        dispatch_settings(**settings),
        time.monotonic,
    )
    models = ModelTable(cluster, aliases or {})
    models.on_shared = dispatcher.share
    for spec in specs:
        dispatcher.apply(WorkerUp(spec.id))
        models.learn(spec.id, {MODEL: {}})
    troubles: list[str] = []

    def trouble(worker_id: str, reason: str) -> None:
        troubles.append(worker_id)
        dispatcher.apply(WorkerDown(worker_id, reason))

    upstream = SpyClient(engine_key)
    urls = [engine.url for engine in engines]
    ranked = frozenset(url for url in urls if urls.count(url) > 1)
    relay = RelayContext(
        dispatcher,
        upstream,
        trouble,
        ranked,
        RelaySettings(
            max_attempts,
            deadlines or Deadlines(),
            worker_headers=False,
            client_ranks=client_ranks,
        ),
        time.monotonic,
        transfer=KvTransfer(dispatcher, kept_s, Bootstraps(upstream)),
    )
    context = _Context(dispatcher, models, relay, door)
    watching = asyncio.create_task(dispatcher.run())
    plane = plane or load_settings({}).data_plane
    state = ServerState()
    requests = RequestLog(time.monotonic)
    cluster.watchers.append(requests)
    picks = Picks(context, requests, tells_key=tells_key)
    relay.attempts.watchers.append(picks.recalled)
    async with _listening(context, limits, plane, state, picks) as url, _client(url) as http:
        served = state.tasks, state.connections, picks
        yield Router(url, http, dispatcher, upstream, troubles, relay.attempts, *served)
    watching.cancel()
    await upstream.aclose()


def _specs(
    engines: Sequence[ScriptedServer], slots: int, prefills: int, bootstrap: str | None
) -> list[WorkerSpec]:
    return [
        WorkerSpec(
            chr(ord("a") + i),
            engine.url,
            role="prefill" if i < prefills else "both",
            rank=i,
            slots=slots,
            kv_bootstrap=bootstrap if i < prefills else None,
        )
        for i, engine in enumerate(engines)
    ]


def _client(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits, trust_env=False)


@contextlib.asynccontextmanager
async def _listening(
    context: AppContext, limits: HttpLimits, plane: DataPlane, state: ServerState, picks: Picks
) -> AsyncIterator[str]:
    """The application behind the protocol of ``evenstep serve``, or ``pick``."""
    requests = picks.requests
    hot = HotPath(context, requests, picks.others) if plane is DataPlane.SPLICE else None
    app = Front(create_app(context), context.lifecycle, requests, context.door)
    config = server_config(app, limits, hot=hot, lifespan="off")

    def protocol() -> asyncio.Protocol:
        return config.http_protocol_class(config=config, server_state=state, app_state={})  # type: ignore[call-arg]

    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for connection in list(state.connections):
            connection.shutdown()
        await until(lambda: not state.connections and not state.tasks)
