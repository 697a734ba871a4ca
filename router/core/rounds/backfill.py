"""Memory reserved for a request that fits no worker yet, and backfilling beside it.

This is EASY backfilling (Lifka, The ANL/IBM SP scheduling system, 1995), with KV memory in place of
processors and the chances that requests still run in place of run times. A worker is reserved for
the request, which fits there once those that ran at that time have freed enough. Others go on
entering if they hardly put this moment off: they end before it, or fit beside the request.
"""

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field

import numpy as np

from router.core.forecast.end_signals import CapSignal
from router.core.forecast.forecast import NO_CAP, Floats, Ints, Running
from router.core.forecast.look_ahead import LookAhead
from router.core.kv_blocks import KvBlocks
from router.core.queue.pool import due_s
from router.core.queue.tier import Tier
from router.core.types import Request, WorkerView

# Steps ahead at which memory is predicted; in between it is interpolated.
_AHEAD: Ints = np.concatenate(([0], np.unique(np.rint(1.5 ** np.arange(24)).astype(np.int64))))
# What enters may put off the moment at which the request fits by this share of the steps until it.
_PUT_OFF = 0.25
_RAN = 0  # column of ``Reservation.held``; the other one is of those that came


@dataclass(slots=True)
class Reservation:
    """A reserved worker, as it was and as it will be.

    Attributes:
        request_id: for whom it was reserved.
        ran: ids of the requests that ran there when it was reserved.
        held: a view of the worker; and for it the expected memory of these requests, and of those
            that came since, at each of the K steps ahead, shape (K, 2).
    """

    request_id: str
    ran: Ints
    held: tuple[WorkerView, Floats] | None = None


@dataclass(slots=True)
class Backfill:
    """A group's reservations, and what may enter beside them; ``begin`` starts each round.

    Attributes:
        made: reservations by worker, which last while each round renews them.
        aside: ids of requests for which none is made: they would fit too late for their target.
        running: the requests that run on workers, by their places in the round.
        look_ahead: what is known of their ends; None: their caps alone.
        now: time of the round.
        step_s: duration of a step; 0 while unknown.
    """

    running: Callable[[Iterable[int]], Running]
    look_ahead: LookAhead | None = None
    made: dict[str, Reservation] = field(default_factory=dict)
    aside: set[str] = field(default_factory=set)
    now: float = 0.0
    step_s: float = 0.0
    _renewed: set[str] = field(default_factory=set)

    def begin(
        self, look_ahead: LookAhead | None, now: float, step_s: float, waits: Callable[[str], bool]
    ) -> None:
        self.look_ahead, self.now, self.step_s = look_ahead, now, step_s
        self.made = {
            worker_id: made
            for worker_id, made in self.made.items()
            if worker_id in self._renewed and waits(made.request_id)
        }
        self.aside = set(filter(waits, self.aside))
        self._renewed = set()

    def worker_for(
        self, request: Request, workers: Sequence[WorkerView], free: Sequence[WorkerView]
    ) -> str | None:
        """Reserve one of the ``free`` workers; None: the request stands aside from now on.

        It is the one that was reserved for it, else the one with most room of those that are not
        reserved for another, if any. If the request would fit there only after its first token is
        due, it stands aside until then. ``workers`` are all of the group, at the round's start.
        """
        own = {i: made for i, made in self.made.items() if made.request_id == request.id}

        def preferred(worker: WorkerView) -> tuple[bool, bool, int]:
            return worker.id in own, worker.id not in self.made, worker.admissible or 0

        chosen = max(free, key=preferred)
        place = next(i for i, one in enumerate(workers) if one.id == chosen.id)
        made = own.get(chosen.id) or Reservation(request.id, self.running([place]).id)
        if self.now < due_s(request):
            due, _ = self._foreseen(request, workers[place], place, made)
            if self.now + due * self.step_s > due_s(request):
                self.aside.add(request.id)
                return None
        self.made[chosen.id] = made
        self._renewed.add(chosen.id)
        return chosen.id

    def stands_aside(self, request: Request) -> bool:
        """Whether no worker is reserved for it, since it would fit too late for its target."""
        return request.id in self.aside and self.now < due_s(request)

    def taken(self, worker_ids: Set[str]) -> None:
        """End the reservations of workers that requests entered otherwise than beside one."""
        for worker_id in worker_ids & self.made.keys():
            del self.made[worker_id]

    def beside(
        self, request: Request, views: tuple[WorkerView, WorkerView], place: int, waiting: Tier
    ) -> tuple[Tier, int] | None:
        """Waiting requests that may enter a reserved worker, and the memory for them together.

        The worker is reserved for ``request``, whose slots stay free. ``views`` are the worker's at
        the round's start and now; what has entered in between is taken to stay.
        """
        first, worker = views
        if not waiting or not worker.admissible or worker.capacity <= request.slots:
            return None
        due, spare = self._foreseen(request, first, place, self.made[worker.id])
        spare += worker.admissible - (first.admissible or 0)
        return self._most(waiting, worker, spare, due) if spare > 0 else None

    def _foreseen(
        self, request: Request, worker: WorkerView, place: int, made: Reservation
    ) -> tuple[float, float]:
        """Steps until a request fits a reserved worker, and the memory then left beside it.

        Minus infinity is left if what ran there has freed enough by now, or never will.
        """
        held, need = self._held_at(worker, place, made), worker.need(request)
        most = (worker.admissible or 0) + held[0].sum()
        due = _first(most - held[:, _RAN], need)
        if not 0 < due < _AHEAD[-1]:
            return due, -np.inf
        due = np.ceil(due * (1 + _PUT_OFF))
        return due, float(np.interp(due, _AHEAD, most - held.sum(axis=1)) - need)

    def _held_at(self, worker: WorkerView, place: int, made: Reservation) -> Floats:
        """``Reservation.held``, anew for another view: one lasts until something changes there."""
        if made.held is None or made.held[0] is not worker:
            running = self.running([place])
            ran = np.isin(running.id, made.ran)
            each = self._each(running, _AHEAD[:, None], worker.kv)
            held = each[:, ran].sum(axis=1), each[:, ~ran].sum(axis=1)
            made.held = worker, np.column_stack(held)
        return made.held[1]

    def _most(
        self, waiting: Tier, worker: WorkerView, spare: float, due: float
    ) -> tuple[Tier, int] | None:
        """Those that may enter, and the memory for them, so that any of them leave enough.

        Of the memory that a request takes now it holds a share, perhaps above 1, once the other is
        due. If no share exceeds s, they may take ``spare`` / s now. s is chosen so that they can
        use most memory.
        """
        needs = np.maximum(1, KvBlocks.needs(worker.kv, waiting.prompt_tokens, waiting.slots))
        if needs.min() > (worker.admissible or 0):
            return None
        count, none = len(waiting), np.zeros(len(waiting), dtype=np.int64)
        caps = (NO_CAP if one.max_tokens is None else one.max_tokens for one in waiting)
        fresh = Running(
            none,
            none,
            waiting.prompt_tokens,
            none,
            np.fromiter(caps, dtype=np.int64, count=count),
            np.full(count, np.nan),
            waiting.prompt_tokens,
            none,
        )
        then = waiting.slots * self._each(fresh, np.array([[int(due)]]), worker.kv)[0]
        shares = np.maximum(then / needs, spare / (worker.admissible or 1))
        order = np.argsort(shares, kind="stable")
        used = np.minimum(needs[order].cumsum(), spare / shares[order])
        share = shares[order[np.argmax(used)]]
        memory = int(spare / share + 1e-9)
        may = np.flatnonzero((shares <= share) & (needs <= memory)).tolist()
        return (Tier.of([waiting[i] for i in may]), memory) if may else None

    def _each(self, running: Running, ahead: Ints, kv: KvBlocks | None) -> Floats:
        """Expected memory of each request so many steps ahead; shape (K, n) for (K, 1)."""
        look_ahead = self.look_ahead or LookAhead(CapSignal())
        profile = look_ahead.profile
        gained = (profile.growth * profile.decoded(running.prefill_left, ahead)).astype(np.int64)
        tokens = running.tokens + gained
        held = tokens if kv is None else kv.each_held(tokens)
        return look_ahead.signal.chances(running, ahead) * held


def _first(freed: Floats, need: int) -> float:
    """Steps until so much memory is free; infinite: it never is."""
    enough = freed >= need
    if not enough.any():
        return np.inf
    at = int(enough.argmax())
    if at == 0:
        return 0.0
    before, after = freed[at - 1], freed[at]
    share = (need - before) / (after - before)
    return float(_AHEAD[at - 1] + share * (_AHEAD[at] - _AHEAD[at - 1]))
