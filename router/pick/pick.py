"""One request that is decided here and served elsewhere, by a gateway; no transport is in it.

It waits as any other request, is given a worker, and ends once: whoever knows best tells how.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from ipaddress import ip_address
from typing import TYPE_CHECKING, Literal, get_args
from urllib.parse import urlsplit

from starlette.types import Scope

from router.core.errors import (
    ConfigError,
    EvenstepError,
    RequestTimeoutError,
    UnreachedError,
    UpstreamError,
)
from router.core.events import Carried, Progressed, PromptCounted
from router.core.targets import Verdict
from router.core.types import Outcome, Request, WorkerSpec
from router.core.worker_specs import authority
from router.proxy.answers import Answer, Header, headers_up
from router.proxy.attempts import Bound
from router.proxy.client_request import ClientRequest
from router.proxy.context import Client, RelayContext

if TYPE_CHECKING:
    from router.pick.picks import Picks

DESTINATION = b"x-gateway-destination-endpoint"
_TRACE = (b"traceparent", b"tracestate")
# Not passed on to engines, unless the router says so; the second is for llm-d's sidecar, which has
# the prompt computed there.
RANK, PREFILLER = b"x-data-parallel-rank", b"x-prefiller-host-port"
# Further endpoints that a gateway may try.
_FALLBACKS = 2
# Longest life of a request whose end nobody tells, where no timeout is set.
_UNHEARD_S = 3600.0

# Who told an end, the best first.
By = Literal["log", "answer", "snapshot", "stream", "recall", "unheard"]


@dataclass(frozen=True, slots=True)
class Told:
    """What a gateway tells of an answer; times in seconds before now, None: unknown.

    Attributes:
        status: of the answer; 0: there was none.
        address: of the engine that gave it; empty: unknown.
        client_left: whether the client did not wait for its end.
        broken: why the engine did not finish it; empty: it did.
    """

    status: int
    address: str = ""
    first_s: float | None = None
    last_s: float = 0.0
    client_left: bool = False
    broken: str = ""


@dataclass(slots=True)
class PickCounts:
    """``open``: requests given to a gateway that have not ended; ``ends``: by who told them."""

    open: int = 0
    moved: int = 0
    ends: dict[str, int] = field(default_factory=lambda: dict.fromkeys(get_args(By), 0))


def authorized(headers: Iterable[Header], removed: Iterable[bytes]) -> Answer:
    """What Envoy's ``ext_authz`` takes: headers for the engine, and those to remove."""
    return Answer(200, b"", (*headers, (b"x-envoy-auth-headers-to-remove", b",".join(removed))))


@cache
def address_of(url: str) -> str:
    """``ip:port``, as gateways know an engine; ConfigError: the URL has a name, or no port."""
    try:
        parts = urlsplit(url)
        ip, port = ip_address(parts.hostname or ""), parts.port or {"https": 443}.get(parts.scheme)
    except ValueError:
        raise ConfigError(
            f"worker {url}: gateways are told an IP address and a port, as in http://10.0.0.7:8000"
        ) from None
    return authority(str(ip), port or 80)


class Addressed:
    """Refuses workers that gateways cannot be told of, as they join."""

    def join(self, spec: WorkerSpec) -> None:
        address_of(spec.url)

    def leave(self, worker_id: str) -> None:
        """Nothing is kept."""


@dataclass(slots=True, eq=False)
class Pick:
    """A request whose body has been read."""

    _picks: "Picks"
    scope: Scope
    _context: RelayContext
    request: Request
    asked: ClientRequest
    worker: WorkerSpec = field(init=False)
    pool_s: float = 0.0
    sent_s: float = 0.0
    until_s: float = 0.0
    logged: bool = False  # whether a gateway's log has shown it running
    absences: int = 0  # how often in a row its engine's snapshots did not show it
    # How it ends if nobody else tells, once the gateway tells no more of it.
    forsaken: Outcome | None = None
    _first_s: float | None = None

    async def serve(self, client: Client) -> None:
        """Tell an HTTP client where its request is to go."""
        headers = await self.place()
        self.carried()
        client.answer(authorized(headers, self._picks.removed(headers)))

    async def place(self) -> list[Header]:
        """Headers for the engine, and the gateway, once there is a worker.

        Raises:
            EvenstepError: there will be none.
        """
        context, request = self._context, self.request
        limit_s = context.settings.deadlines.within(self.asked.timeout_s).request_timeout_s
        try:
            with Bound() as waiting:
                if limit_s is not None:
                    own = limit_s == self.asked.timeout_s
                    late = RequestTimeoutError(f"not answered within {limit_s:g} s", own=own)
                    waiting.within(limit_s, late)
                self.worker = await context.port.submit(request)
                context.leading.check()
                headers = self._headers()
        except BaseException as error:
            left = isinstance(error, asyncio.CancelledError) and not self._picks.closed
            context.port.end(request, Outcome.ABORTED if left else Outcome.FAILED)
            if request.targets is not None and isinstance(error, EvenstepError):
                context.port.judged(request.group, "queue")
            raise
        now_s = self.sent_s = context.clock()
        self.pool_s = now_s - request.arrival_s
        # A client's own limit ends its wait, not the engine's work.
        longest_s = context.settings.deadlines.request_timeout_s
        self.until_s = now_s + (_UNHEARD_S if longest_s is None else longest_s)
        self._picks.keep(self)
        return headers

    def carried(self) -> None:
        """Take its prompt for computed: over HTTP nobody tells when the answer begins."""
        self._context.port.apply(Carried(self.request.id, self.sent_s))

    def _headers(self) -> list[Header]:
        worker, head = self.worker, self.asked.head
        rank = self._rank_sent(worker)
        headers = headers_up((), self.request.id, rank, head.client_id)
        endpoints = [address_of(worker.url), *self._others(rank)]
        directed = DESTINATION, ",".join(endpoints).encode()
        headers += [each for each in self.scope["headers"] if each[0] in _TRACE]
        if (
            prefiller := self._picks.prefiller(self.asked.prefills, self.request.lacks)
        ) is not None:
            headers.append((PREFILLER, address_of(prefiller.url).encode()))
        return [directed, *headers, *self._picks.credentials]

    def _rank_sent(self, worker: WorkerSpec) -> int | None:
        return worker.rank if worker.url in self._context.ranked else None

    def _others(self, rank: int | None) -> list[str]:
        """Endpoints that could serve it as it is sent: those with room first, else in their order.

        Without room it waits in the engine; without an endpoint the gateway would take any.
        """
        found = [address_of(self.worker.url)]
        workers = list(self._picks.cluster.group_of(self.worker.id).workers.values())
        at = next(i for i, each in enumerate(workers) if each.spec.id == self.worker.id)
        next_ = (*workers[at + 1 :], *workers[:at])
        for each in sorted(next_, key=lambda worker: not worker.free_slots):
            if len(found) > _FALLBACKS:
                break
            fits = each.spec.id not in self.request.lacks and self._rank_sent(each.spec) == rank
            if fits and each.takes and address_of(each.spec.url) not in found:
                found.append(address_of(each.spec.url))
        return found[1:]

    def begun(self, told: Told) -> None:
        """Its answer begins."""
        self._find(told.address)
        unanswered = not told.status or (told.broken and told.first_s is None)
        if self._first_s is not None or unanswered:
            return
        context, worker_id = self._context, self.worker.id
        now_s, good = context.clock(), told.status < 400
        self._first_s = now_s - (told.first_s or 0.0)
        if not (good or told.broken):
            context.judge_answer(self.request, worker_id, told.status)
        context.port.began(self.request, worker_id, self._first_s, good=good)

    def counted(self, tokens: tuple[int, int] | None, streamed: int = 0) -> None:
        """Its answer told its tokens of prompt and output, or was a stream of so many."""
        port, request = self._context.port, self.request
        if tokens is not None and request.slots == 1:
            port.apply(PromptCounted(request.id, *tokens))
        else:
            port.apply(Progressed(request.id, streamed if tokens is None else tokens[1]))

    def end(self, outcome: Outcome) -> None:
        """End it after ``begun``; called once."""
        line = self.asked.line
        self._context.port.end(self.request, outcome)
        if (targets := self.request.targets) is None or outcome is Outcome.ABORTED:
            return
        verdict: Verdict | None = None
        if outcome is not Outcome.COMPLETED:
            verdict = "failed"
        elif self._first_s is not None:
            tokens = 0 if line is None or line.output_tokens is None else line.output_tokens
            last_s = self._context.clock() - self._first_s
            tpot_s = last_s / (tokens - 1) if tokens > 1 else None
            verdict = targets.verdict(self.pool_s, self._first_s - self.request.arrival_s, tpot_s)
        if verdict is not None:
            self._context.port.judged(self.worker.group, verdict)
            if line is not None:
                line.verdict = verdict

    def broke(self, error: UpstreamError) -> None:
        """Its engine did not finish."""
        self._context.judge_failure(self.request, self.worker.id, error)

    def _find(self, address: str) -> None:
        """Count it at the engine that answered, if the gateway has tried others."""
        if not address or address == address_of(self.worker.url):
            return
        cluster, rank = self._picks.cluster, self._rank_sent(self.worker)
        for each in cluster.group_of(self.worker.id).workers.values():
            spec = each.spec
            if address_of(spec.url) == address and self._rank_sent(spec) == rank:
                self.broke(UnreachedError(f"the gateway went on to {address}"))
                self._picks.move(self, spec)
                return
