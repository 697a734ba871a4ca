"""A proxy's end: the dispatcher's interface over a connection to the deciding process.

Of workers' health the directory is some hundredths of a second old at most, of what is learned a
second. Each proxy has a retry budget of its own.

While the deciding process is gone, streams go on. Waiting requests get 503 after ``GONE_S``, or
when it is silent for ``SILENT_S``.
"""

import asyncio
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace

import msgspec

from router.core import events as ev
from router.core.clock import Clock
from router.core.errors import DisplacedError, EvenstepError, NoWorkerError, QueueTimeoutError
from router.core.queue.retry import RetryBudget
from router.core.request_watcher import RequestWatcher, Served
from router.core.stats import TokenStats
from router.core.targets import Verdict
from router.core.types import Outcome, Request
from router.dispatch.interface import Again, Waiter
from router.processes import messages as m
from router.processes.directory import Directory, Pair
from router.processes.peer import Peer
from router.processes.proxy_counters import Tallies

GONE_S = 5.0
# Longer than a busy machine delays a process.
SILENT_S = 10.0
TICK_S = 0.25
# A request that kills the connection must not be repeated for ever.
_MOST_LOST = 3
# For requests that get no worker; other errors come before admission.
_OUTCOMES: Mapping[type[EvenstepError], Outcome] = {
    QueueTimeoutError: Outcome.EXPIRED,
    DisplacedError: Outcome.DISPLACED,
    NoWorkerError: Outcome.FAILED,
}
_TICKS_PER_BEAT = 4


@dataclass(slots=True)
class _Entry:
    """A request that waits or is at a worker; ``lost``: connections that ended while it waited."""

    request: Request
    waiter: Waiter
    worker_id: str | None = None
    prompt_tokens: int | None = None
    tokens: int = 0
    lost: int = 0

    @property
    def served(self) -> Served | None:
        if self.worker_id is None:
            return None
        prompt_tokens = self.prompt_tokens or self.request.prompt_tokens
        return Served(self.worker_id, prompt_tokens, self.tokens)


@dataclass(frozen=True, slots=True)
class Hearing:
    """Handlers of ``Told``, ``Recall`` and ``Try``."""

    learn: Callable[[Directory], None]
    recall: Callable[[str, str, bool], None]
    refusal: Callable[[Pair], str]


class RemoteDispatcher:
    """Implements ``DispatchPort``, not for split or metered requests; ``seat``: slot, restarts."""

    hearing: Hearing

    def __init__(
        self,
        clock: Clock,
        tallies: Tallies,
        watcher: RequestWatcher,
        seat: tuple[int, int],
        directory: Directory,
    ) -> None:
        self._seat = seat
        self._clock = clock
        self._tallies = tallies
        self._watcher = watcher
        self._entries: dict[str, _Entry] = {}
        self._ended: list[tuple[_Entry, Outcome]] = []
        self._peer: Peer[m.FromDecider] | None = None
        self._gone_s: float | None = clock()
        self._ticks = 0
        self._changed = asyncio.Event()  # whether the deciding process is here, perhaps
        self._budgets: dict[str, RetryBudget] = {}
        self.learn(directory)

    # the connection

    def connected(self, peer: Peer[m.FromDecider]) -> None:
        self._peer, self._gone_s = peer, None
        self._changed.set()
        self._tallies.anew()
        ended = [entry for entry, _ in self._ended]
        sent = [entry for entry in (*ended, *self._entries.values()) if entry.worker_id]
        held = [m.Held(one.request, one.worker_id or "", one.tokens) for one in sent]
        peer.send(m.Hello(*self._seat, held))
        for entry, outcome in self._ended:
            peer.send(ev.Ended(entry.request.id, outcome))
        self._ended.clear()
        for entry in self._waiting():
            if entry.lost < _MOST_LOST:
                self._ask(ev.Arrived(entry.request), entry.request)
            else:
                self._deny(entry.request.id, deserted())

    def lost(self) -> None:
        self._peer, self._gone_s = None, self._clock()
        self._changed.set()
        for entry in self._waiting():
            entry.lost += 1

    def close(self) -> None:
        if self._peer is not None:
            self._peer.close()

    def tick(self) -> None:
        self._ticks += 1
        self._changed.set()
        if (peer := self._peer) is not None:
            peer.silent += 1
            if (tally := self._tallies.take()) is not None:
                peer.send(tally)
            elif self._ticks % _TICKS_PER_BEAT == 0:
                peer.send(m.Beat())
        if self.deserted:
            for entry in self._waiting():
                self._deny(entry.request.id, deserted())
                self._send(ev.Ended(entry.request.id, Outcome.FAILED))

    @property
    def here(self) -> bool:
        return self._peer is not None and self._peer.silent * TICK_S < SILENT_S

    @property
    def deserted(self) -> bool:
        if self._peer is not None:
            return self._peer.silent * TICK_S >= SILENT_S
        return self._gone_s is not None and self._clock() - self._gone_s >= GONE_S

    async def back(self) -> None:
        """Wait for the deciding process, as long as requests do; then raise NoWorkerError."""
        while not self.here:
            if self.deserted:
                raise deserted()
            self._changed.clear()
            await self._changed.wait()

    async def gone(self) -> None:
        while not self.deserted:
            self._changed.clear()
            await self._changed.wait()

    def receive(self, message: m.FromDecider) -> None:
        match message:
            case m.Given():
                if (entry := self._entries.get(message.id)) is not None:
                    entry.worker_id = message.worker.id
                    entry.request = replace(entry.request, group=message.worker.group)
                    if not entry.waiter.done():
                        self._watcher.dispatched(entry.request)
                        entry.waiter.set_result(message.worker)
            case m.Denied():
                self._deny(message.id, m.error_of(message))
            case m.Told():
                self.hearing.learn(message.directory)
                self._send(m.Followed(message.number))
            case m.Try():
                self._send(m.Tried(message.number, self.hearing.refusal(message.pair)))
            case m.Recall():
                self.hearing.recall(message.worker_id, message.reason, message.streams)
            case m.Beat():  # the peer notes every message as a sign of life
                pass

    def learn(self, directory: Directory) -> None:
        self.directory = directory
        patience = directory.patience
        retries = patience.retry_budget, patience.retry_min_per_s
        known = self._budgets
        self._budgets = {n: known.get(n) or RetryBudget(*retries) for n in directory.groups}
        for budget in self._budgets.values():
            budget.configure(*retries)

    def _waiting(self) -> list[_Entry]:
        return [entry for entry in self._entries.values() if entry.worker_id is None]

    def _ask(self, event: ev.Arrived | ev.Returned, request: Request) -> None:
        if self._peer is not None and not self._peer.send(event):
            said = "the request cannot be sent to the deciding process; see the router's log"
            self._deny(request.id, EvenstepError(said))

    def _deny(self, request_id: str, error: EvenstepError) -> None:
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return
        if (outcome := _OUTCOMES.get(type(error))) is not None:
            self._watcher.ended(entry.request, None, outcome)
        if not entry.waiter.done():
            entry.waiter.set_exception(error)

    def _send(self, message: msgspec.Struct) -> None:
        if self._peer is not None:
            self._peer.send(message)

    # requests of the relays

    def submit(self, request: Request) -> Waiter:
        """A full pool, too, is reported through the waiter, not raised."""
        if self.deserted:
            raise deserted()
        if (budget := self._budgets.get(request.group)) is not None:
            budget.earn(self._clock())
        return self._enter(request, ev.Arrived(request))

    def _enter(self, request: Request, event: ev.Arrived | ev.Returned) -> Waiter:
        waiter: Waiter = asyncio.get_running_loop().create_future()
        self._entries[request.id] = _Entry(request, waiter)
        self._ask(event, request)
        return waiter

    def end(self, request: Request, outcome: Outcome) -> None:
        entry = self._entries.pop(request.id, None)
        if entry is None:
            return
        entry.waiter.cancel()
        self._watcher.ended(entry.request, entry.served, outcome)
        if self._peer is not None:
            self._peer.send(ev.Ended(request.id, outcome))
        elif entry.worker_id is not None:
            self._ended.append((entry, outcome))

    def give_back(self, request: Request, *failed_by: str) -> Again:
        again = request.again(*failed_by)
        self._entries.pop(request.id, None)
        return again, self._enter(again, ev.Returned(request.id, again))

    def may_ask_elsewhere(self, request: Request, asked: Set[str]) -> bool:
        group = self.directory.models.get(request.model, request.group)
        card = self.directory.groups.get(group)
        if card is None or not card.askable - asked:
            return False
        within = self._budgets[group].spend(self._clock())
        self._tallies.unreturned[group] += not within
        return within

    # answers

    def began(
        self, request: Request, worker_id: str, now_s: float, *, good: bool = True
    ) -> TokenStats:
        self._watcher.first_byte(request, now_s)
        if self._peer is not None:
            self._peer.send(ev.Began(request.id, worker_id, now_s, good))
        entry = self._entries.get(request.id)
        return self._tallies.tokens[(entry.request if entry else request).group]

    def judged(self, group: str, verdict: Verdict) -> None:
        self._tallies.verdicts[group][verdict] += 1

    def apply(self, event: ev.AnswerEvent | ev.Progressed | ev.PromptCounted) -> None:
        if isinstance(event, ev.Progressed | ev.PromptCounted):
            entry = self._entries.get(event.request_id)
            if entry is None:
                return
            if isinstance(event, ev.Progressed):
                entry.tokens = event.generated_tokens
            else:
                entry.prompt_tokens = event.prompt_tokens
                entry.tokens = event.output_tokens or entry.tokens
        if self._peer is not None:
            self._peer.send(event)

    def trouble(self, worker_id: str, reason: str) -> None:
        self._send(m.Trouble(worker_id, reason))

    def energy_j(self, request: Request) -> float | None:
        return None


def deserted() -> NoWorkerError:
    """For requests that need the deciding process while it is gone."""
    return NoWorkerError("the router's deciding process is gone for now; retry")
