"""All picks of a router, until their ends; the HTTP form of asking for one.

The HTTP form is what Envoy's ``ext_authz`` asks: the client's request, its path after ``/pick``. An
answer with 200 says in headers where it is to go; any other is for the client. The request router
of Ray Serve (``engine_patches.ray_serve``) asks ``POST /internal/route``, and gets it as JSON.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import cast

import msgspec
from starlette.types import Scope

from router.access.door import SHOWN_IN, Door
from router.core.errors import InvalidRequestError, NotServedError, NoWorkerError, UpstreamError
from router.core.state.cluster import Cluster
from router.core.types import Outcome, Sight, WorkerSpec
from router.dispatch.models import Route
from router.pick.pick import (
    DESTINATION,
    PREFILLER,
    RANK,
    By,
    Pick,
    PickCounts,
    Told,
    address_of,
    authorized,
)
from router.proxy.answers import Answer, Header, header
from router.proxy.beside_pool import PATHS, Aside
from router.proxy.body import model_in
from router.proxy.context import Client, Serves, ServingContext
from router.proxy.endpoints import ENDPOINTS, relay_of
from router.proxy.request_log import RequestLog
from router.proxy.splice import KEY, ServesOf

log = logging.getLogger(__name__)

SUBSET = b"x-gateway-destination-endpoint-subset"
_PREFIX, _ROUTE, _ROUTE_END = "/pick/", "/internal/route", "/internal/route/end"
# Names of a tenant where there are no keys, as llm-d's gateways send them.
_FAIRNESS = (b"x-llm-d-inference-fairness-id", b"x-gateway-inference-fairness-id")
_LONGEST_NAME = 128

# What engines may be asked that takes no slot.
_BESIDE = {"POST": PATHS, "GET": ("/v1/models", "/health", "/version")}

_LOOK_S = 0.25
# Looks in a row at snapshots without a request, after which it is over; the second, where a
# gateway's log should tell, or it was never there.
_ABSENCES, _ABSENCES_LONG = 4, 20
# A log that shows what runs, shows a request by then.
_SHOWN_S = 15.0


class Beside:
    """A request that needs no slot: it goes to the least busy worker at once."""

    def __init__(self, picks: "Picks", headers: list[Header]) -> None:
        self._picks, self._headers = picks, headers

    async def serve(self, client: Client) -> None:
        client.answer(authorized(self._headers, self._picks.removed(self._headers)))

    async def place(self) -> list[Header]:
        return self._headers


class Picks:
    """Requests of gateways, waiting or given to them."""

    def __init__(
        self, context: ServingContext, requests: RequestLog, *, tells_key: bool = False
    ) -> None:
        self._context = context
        self._tells_key = tells_key
        self.requests = requests
        self._aside = Aside(context)
        self.logs = 0  # access logs that gateways are sending
        self.shows_running = False  # whether those show requests that have not ended
        self.counts = PickCounts()
        self._open: dict[str, Pick] = {}

    @property
    def cluster(self) -> Cluster:
        return self._context.dispatcher.cluster

    @property
    def ready(self) -> bool:
        """Whether gateways are to ask this replica."""
        return self._context.relay.leading.serves and not self._context.lifecycle.draining

    @property
    def closed(self) -> bool:
        return self._context.lifecycle.closed

    @property
    def door(self) -> Door | None:
        return self._context.door

    @property
    def credentials(self) -> list[Header]:
        """What gateways are to show to the engines."""
        return list(self._context.relay.client.credentials) if self._tells_key else []

    def begin(self, scope: Scope) -> None:
        """Begin a request that comes by another way than HTTP; its key is checked."""
        self.requests.begin(scope)
        scope[KEY] = None
        if self.closed:
            raise NoWorkerError("the router is ending; retry")
        if self.door is not None:
            scope[KEY] = self.door.enter(scope)

    def leave(self, scope: Scope, status: int) -> None:
        """End it, unless it was given a worker."""
        if KEY in scope:
            self._finish(scope, status)

    def removed(self, headers: Iterable[Header]) -> list[bytes]:
        """Headers of a client that engines must not see."""
        given = {name for name, _ in headers}
        names = (*(() if self.door is None else SHOWN_IN), RANK, PREFILLER)
        return [name for name in names if name not in given]

    async def of(self, scope: Scope, body: bytes) -> Pick | Beside:
        """The pick of a request; errors as from ``relay_of``."""
        if (refusal := self._context.relay.leading.refusal) is not None:
            raise refusal
        subset = _listed(header(scope["headers"], SUBSET))
        barred = partial(self._barred, subset)
        method, path = scope["method"], scope["path"]
        if not (method == "POST" and path in ENDPOINTS):
            if path not in _BESIDE.get(method, ()):
                raise NotServedError(f"{method} {path} is not served")
            return self._beside(body, subset)
        if not scope.get("tenant"):
            named = (header(scope["headers"], name) for name in _FAIRNESS)
            scope["tenant"] = next(filter(None, named), b"").decode("latin-1")[:_LONGEST_NAME]
        make = cast(Callable[..., Serves], partial(Pick, self, scope))
        return cast(Pick, await relay_of(self._context, scope, body, make, barred))

    def _barred(self, subset: frozenset[str] | None, route: Route) -> frozenset[str]:
        if subset is None:
            return route.lacks
        models, able = self._context.models, set[str]()
        for group in models.groups(route.group):
            specs = (worker.spec for worker in group.workers.values())
            able.update(spec.id for spec in specs if address_of(spec.url) in subset)
        every = {i for group in models.groups(route.group) for i in group.workers}
        if not (able - route.lacks) & models.askable(route.group):
            raise NoWorkerError("no endpoint of the subset is up; retry")
        return route.lacks | (every - able)

    def _beside(self, body: bytes, subset: frozenset[str] | None) -> Beside:
        models = self._context.models
        model = models.resolve(model_in(body)) if body.lstrip()[:1] == b"{" else None
        groups, outside = models.serving(model), frozenset[str]()
        if subset is not None:
            workers = [worker for group in groups for worker in group.workers.values()]
            outside = frozenset(w.spec.id for w in workers if address_of(w.spec.url) not in subset)
        worker = self._aside.choose(groups, outside, models.lacking(model))
        headers = [(DESTINATION, address_of(worker.spec.url).encode())]
        if worker.spec.url in self._context.relay.ranked:
            headers.append((RANK, str(worker.spec.rank).encode()))
        return Beside(self, [*headers, *self.credentials])

    def prefiller(self, group: str | None, lacks: frozenset[str]) -> WorkerSpec | None:
        """The least busy worker of a prefill group; None: there is none."""
        if (found := self.cluster.groups.get(group or "")) is None:
            return None
        with suppress(NoWorkerError):  # then a decode worker computes it
            worker = self._aside.choose([found], frozenset(), lacks)
            return worker.spec
        return None

    # What was given to a gateway.

    def keep(self, pick: Pick) -> None:
        self._open[pick.request.id] = pick
        self.counts.open += 1
        pick.scope["evenstep.held"] = pick.scope.pop(KEY)

    def known(self, request_id: str) -> Pick | None:
        """By the id that a gateway sends to engines."""
        return self._open.get(request_id.partition(".")[0])

    def move(self, pick: Pick, to: WorkerSpec) -> None:
        self._context.dispatcher.move(pick.request, to.id)
        pick.worker = to
        self.counts.moved += 1

    def recalled(self, worker_id: str, _: str, streams: bool) -> None:
        """Nothing more is to be expected of a worker, as ``Attempts.watchers`` are told."""
        for pick in list(self._open.values()) if streams else ():
            if pick.worker.id == worker_id:
                self.end(pick, Told(0), "recall", Outcome.FAILED)

    def end(self, pick: Pick, told: Told, by: By, outcome: Outcome | None = None) -> None:
        """End it, if nobody has; without an ``outcome``, by what is told."""
        if self._open.pop(pick.request.id, None) is None:
            return
        self.counts.open -= 1
        self.counts.ends[by] += 1
        pick.begun(told)
        if told.broken:
            pick.broke(UpstreamError(told.broken))
        if outcome is None:
            failed = told.broken or told.status >= 500
            outcome = Outcome.FAILED if failed else Outcome.COMPLETED
            outcome = Outcome.ABORTED if told.client_left else outcome
        pick.end(outcome)
        pick.scope[KEY] = pick.scope["evenstep.held"]
        self._finish(pick.scope, told.status)

    def _finish(self, scope: Scope, status: int) -> None:
        key = scope.pop(KEY)
        if self.door is not None:
            self.door.leave(key)
        if status and (line := scope.get("evenstep.line")) is not None:
            line.status = status
        self.requests.end(scope)

    async def run(self) -> None:
        """Look for requests whose end nobody has told."""
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                self.look(self._context.clock())
            except Exception:
                log.exception("requests at gateways could not be looked at")

    def look(self, now_s: float) -> None:
        for pick in list(self._open.values()):
            by, outcome, patience = self._seen(pick, now_s)
            pick.absences = 0 if outcome is None else pick.absences + 1
            if outcome is not None and pick.absences >= patience:
                self.end(pick, Told(0), by, outcome)
            elif now_s > pick.until_s and by != "snapshot":  # which knows better
                self.end(pick, Told(0), "unheard", Outcome.EXPIRED)

    def _seen(self, pick: Pick, now_s: float) -> tuple[By, Outcome | None, int]:
        """How it has ended if this is seen so often in a row; None: it may go on."""
        patience = _ABSENCES_LONG if self.logs else _ABSENCES
        if self.cluster.worker(pick.worker.id).feed is None:
            if not self.logs:
                return "stream", pick.forsaken, patience
            shown = pick.logged or not self.shows_running or now_s < pick.sent_s + _SHOWN_S
            return "unheard", None if shown else Outcome.ABORTED, _ABSENCES
        sight, cancelled = self.cluster.sight(pick.request.id), pick.forsaken is Outcome.ABORTED
        if sight is Sight.HERE:
            return "snapshot", None, patience
        if cancelled or sight is Sight.UNSEEN:  # its client left before it was sent
            return "snapshot", Outcome.ABORTED, patience if cancelled else _ABSENCES_LONG
        outcome = Outcome.COMPLETED if sight is Sight.ENDED else Outcome.FAILED
        return "snapshot", outcome, patience

    # The HTTP form.

    def others(self, scope: Scope) -> ServesOf | None:
        """Who reads a request of the clients' port that is for a gateway."""
        path = scope["path"]
        if path.startswith(_PREFIX):
            scope["path"] = path[len(_PREFIX) - 1 :]
            return self._authorize
        if scope["method"] == "POST" and path in (_ROUTE, _ROUTE_END):
            return self._route if path == _ROUTE else self._route_end
        return None

    async def _authorize(self, _: ServingContext, scope: Scope, body: bytes) -> Serves:
        # Over HTTP it could only be the client's.
        scope["headers"] = [each for each in scope["headers"] if each[0] != SUBSET]
        return await self._unchanged(scope, body)

    async def _unchanged(self, scope: Scope, body: bytes) -> Pick | Beside:
        pick = await self.of(scope, body)
        if isinstance(pick, Pick) and pick.asked.body is not body:
            raise InvalidRequestError(
                "this gateway cannot rename the model: ask for it by its own name", param="model"
            )
        return pick

    async def _route(self, _: ServingContext, scope: Scope, body: bytes) -> Serves:
        chat = b'"messages"' in body
        scope["path"] = "/v1/chat/completions" if chat else "/v1/completions"
        return _AsJson(await self._unchanged(scope, body))

    async def _route_end(self, _: ServingContext, __: Scope, body: bytes) -> Serves:
        try:
            ended = msgspec.json.decode(body, type=_RouteEnd)
        except msgspec.DecodeError as error:
            raise InvalidRequestError(f"not an end of a request: {error}") from None
        if (pick := self.known(ended.request_id)) is not None:
            told = Told(ended.status, client_left=ended.client_left)
            self.end(pick, told, "answer")
        return _Done()


class _RouteEnd(msgspec.Struct):
    request_id: str
    status: int = 200
    client_left: bool = False


class _AsJson:
    def __init__(self, pick: Pick | Beside) -> None:
        self._pick = pick

    async def serve(self, client: Client) -> None:
        headers = await self._pick.place()
        if isinstance(self._pick, Pick):
            self._pick.carried()
        endpoint = header(headers, DESTINATION).decode().partition(",")[0]
        host, _, port = endpoint.rpartition(":")
        rank = header(headers, RANK)
        told = {
            "host": host.strip("[]"),
            "port": int(port),
            "replica_id": self._pick.worker.id if isinstance(self._pick, Pick) else endpoint,
            "request_id": header(headers, b"x-request-id").decode(),
            "data_parallel_rank": int(rank) if rank else None,
        }
        json = ((b"content-type", b"application/json"),)
        client.answer(Answer(200, msgspec.json.encode(told), json))


class _Done:
    async def serve(self, client: Client) -> None:
        client.answer(Answer(204, b""))


def _listed(value: bytes) -> frozenset[str] | None:
    """Endpoints of a list; None: there is no list."""
    return frozenset(value.decode("latin-1").replace(",", " ").split()) if value else None
