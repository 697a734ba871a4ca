"""One round: from pool and workers to checked assignments."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

from msgspec import structs

from router.core.policies.policy_protocol import NOTHING, Known, Policy
from router.core.policies.room import Room, limited
from router.core.queue.tier import Tier
from router.core.rounds.backfill import Backfill
from router.core.rounds.checks import any_fits, check
from router.core.types import Assignment, Hits, Request, WorkerView


def assign(
    policy: Policy,
    tiers: Iterable[Sequence[Request]],
    workers: Sequence[WorkerView],
    known: Known = NOTHING,
    askable: Set[str] = frozenset(),
    late_since: float = -math.inf,
    *,
    aged: bool = False,
    backfill: Backfill | None = None,
) -> list[Assignment]:
    """Let a policy assign tier after tier while capacity lasts, each in one call.

    Tiers share the round's budget in proportion to the slots that each fills.

    If requests of a tier lack memory, a worker is reserved for the oldest of them; else smaller
    requests would take all that becomes free. Later tiers receive it only beside that request. So
    where memory is limited the oldest request is a tier of its own once it has waited past the
    bound.

    Where all places for LoRA adapters are taken, a request of a further one waits. Once it is past
    the bound, no request joins the adapter with the fewest on a worker: its place becomes free.

    Args:
        policy: if it solves a program, its ``share`` is set for each call.
        tiers: groups of waiting requests, most urgent first.
        workers: live workers of one group.
        known: what the policy may know beyond these views.
        askable: ids of workers that take requests, now or soon. A failed request waits for those
            that it does not avoid; without any it goes to all.
        late_since: if a tier's first request arrived no later, and lacks memory everywhere, neither
            do the others of its tier receive the worker that is reserved for it.
        aged: the policy weighs how long requests have waited, so none needs a tier of its own.
        backfill: the group's reservations; None: they hold for this round, and reserve a worker
            wholly, that with most memory.

    Raises:
        PolicyError: the policy broke its contract (see ``Policy.assign``).
    """
    in_turn = [tier if isinstance(tier, Tier) else Tier.of(tier) for tier in tiers]
    memory = limited(workers)
    if memory and in_turn and not aged and in_turn[0][0].arrival_s <= late_since:
        first = in_turn[0]
        parts = first.requests[:1], first.requests[1:]
        in_turn[:1] = [first.of_same(part) for part in parts]
    round_ = _Round(policy, workers, known, askable, late_since, backfill, memory)
    shares = [1.0] if len(in_turn) == 1 else _shares(in_turn, workers)
    done: list[Assignment] = []
    for tier, share in zip(in_turn, shares, strict=True):
        done += round_.serve(tier, share)
    return done


# Of the oldest that are left so many may enter beside a reservation in a round.
_BESIDE = 128


@dataclass(slots=True)
class _Round:
    """The workers and what is known of them, as assignments change them.

    ``memory``: true if that of some worker is limited.
    """

    policy: Policy
    workers: Sequence[WorkerView]
    known: Known
    askable: Set[str]
    late_since: float
    backfill: Backfill | None
    memory: bool
    _at_first: Sequence[WorkerView] = field(init=False)
    # The last answer, of which the state above knows nothing yet; the last tier, and all that has
    # entered of it.
    _last: tuple[Sequence[Assignment], Tier] | None = None
    _served: tuple[Sequence[Assignment], Tier] = (), Tier.of(())
    _reserved: dict[str, Request] = field(default_factory=dict)  # by worker, for whom it is
    _emptied: tuple[str, str] | None = None  # worker and adapter that no request joins

    def __post_init__(self) -> None:
        self._at_first = self.workers

    def serve(self, tier: Tier, share: float) -> Sequence[Assignment]:
        self._receive()
        self._empty_place(tier)
        done, before = self._served
        if self.memory and len(done) < len(before):
            self._reserve(before.without(done))
        early: Sequence[Assignment] = ()
        first = tier.requests[:1]
        if self.memory and first and first[0].arrival_s <= self.late_since:
            alone = tier.of_same(first)
            if self._lacking(alone):
                early = self._beside(alone, share)
                if not early:
                    self._reserve(alone)
                tier = tier.of_same(tier.requests[1:])
                self._receive()
        if self.backfill is None:
            done = self._ask(tier, self._offered(tier), share)
        else:
            share /= 1 + len(self._reserved)
            done = self._ask(tier, self._offered(tier), share)
            self.backfill.taken({worker_id for _, worker_id in done})
            if self._reserved and len(done) < len(tier):
                done = [*done, *self._beside(tier.without(done, _BESIDE), share)]
        self._served = done, tier
        return [*early, *done]

    def _ask(self, tier: Tier, workers: Sequence[WorkerView], share: float) -> Sequence[Assignment]:
        done: Sequence[Assignment] = ()
        if any_fits(tier, workers, memory=self.memory):
            if self.policy.solves:
                self.policy.share = share
            done = self.policy.assign(tier, workers, self.known)
            check(done, tier, workers, memory=self.memory, busy_from=self.known.busy_from)
        self._last = done, tier
        return done

    def _beside(self, left: Tier, share: float) -> Sequence[Assignment]:
        """Let some of these enter reserved workers."""
        done: list[Assignment] = []
        for place, worker_id in enumerate([worker.id for worker in self.workers]):
            self._receive()
            request, worker = self._reserved.get(worker_id), self.workers[place]
            if self.backfill is None or request is None or worker_id in self._closed(left):
                continue
            views = self._at_first[place], worker
            if (found := self.backfill.beside(request, views, place, left)) is None:
                continue
            tier, memory = found
            workers = [structs.replace(one, capacity=min(0, one.capacity)) for one in self.workers]
            unit = "admissible_tokens" if worker.kv is None else "admissible_blocks"
            capacity = worker.capacity - request.slots
            workers[place] = structs.replace(worker, capacity=capacity, **{unit: memory})
            more = self._ask(tier, workers, share)
            done += more
            left = left.without(more)
        return done

    def _receive(self) -> None:
        """Take the last answer into account."""
        done, tier = self._last or ((), None)
        self._last = None
        if tier is None or not done:
            return
        self.workers = _after(done, tier, self.workers, self.known.hits)
        if (outlook := self.known.outlook) is not None:
            outlook = outlook.after(done, tier.by_id, self.workers)
            self.known = replace(self.known, outlook=outlook)

    def _lacking(self, tier: Tier) -> Sequence[Request]:
        """Those that lack memory, where workers are offered that have a slot."""
        offered = self._offered(tier)
        if max([one.capacity for one in offered]) <= 0:
            return ()
        fitting = Room(offered).fitting(tier)
        if len(fitting) == len(tier):
            return ()
        fit = {request.id for request in fitting}
        return [request for request in tier if request.id not in fit]

    def _reserve(self, tier: Tier) -> None:
        """Reserve a worker for the first that lacks memory and does not stand aside, if any."""
        every = self._lacking(tier)
        if self.backfill is not None:
            every = [each for each in every if not self.backfill.stands_aside(each)]
        if not every:
            return
        lacking = every[0]
        free = [one for one in self._offered(tier) if one.capacity > 0]
        worker_id: str | None = max(free, key=lambda worker: worker.admissible or 0).id
        if self.backfill is not None:
            worker_id = self.backfill.worker_for(lacking, self._at_first, free)
        if worker_id is not None:
            self._reserved[worker_id] = lacking

    def _offered(self, tier: Tier) -> Sequence[WorkerView]:
        """Closed and reserved workers have no capacity."""
        closed = self._closed(tier) | self._reserved.keys()
        if not closed:
            return self.workers
        return [
            structs.replace(one, capacity=min(0, one.capacity)) if one.id in closed else one
            for one in self.workers
        ]

    def _closed(self, tier: Tier) -> Set[str]:
        """Workers that the tier avoids, or that lack its model or a place for its adapter."""
        closed = tier.lacks
        if tier.avoid and self.askable - tier.avoid - tier.lacks:
            closed = closed | tier.avoid
        if tier.adapter:
            closed = closed | {
                one.id
                for one in self.workers
                if (one.id, tier.adapter) == self._emptied or not one.has_place(tier.adapter)
            }
        return closed

    def _empty_place(self, tier: Tier) -> None:
        """Let nobody join an adapter if a late request has no place; the first one decides.

        The least number on a worker never grows so, and ends with its last request at the latest.
        """
        late = tier.adapter and tier and tier[0].arrival_s <= self.late_since
        if self._emptied is not None or not late:
            return
        able = self.askable - tier.lacks
        workers = [one for one in self.workers if one.id in able]
        if not any(one.has_place(tier.adapter) for one in workers):
            taken = [(n, one.id, adapter) for one in workers for adapter, n in one.adapters.items()]
            self._emptied = min(taken)[1:] if taken else None


def _shares(tiers: Sequence[Tier], workers: Sequence[WorkerView]) -> list[float]:
    free = sum(max(0, worker.capacity) for worker in workers)
    wanted = accumulate((int(tier.slots.sum()) for tier in tiers), initial=0)
    filled = [min(free, slots) for slots in wanted]
    return [(after - before) / (filled[-1] or 1) for before, after in pairwise(filled)]


def _after(
    assignments: Sequence[Assignment],
    tier: Tier,
    workers: Sequence[WorkerView],
    hits: Hits | None,
) -> list[WorkerView]:
    received: dict[str, list[Request]] = {}
    for request_id, worker_id in assignments:
        received.setdefault(worker_id, []).append(tier.by_id[request_id])
    after = []
    for index, worker in enumerate(workers):
        requests = received.get(worker.id, ())
        cached = sum(hits(one)[index] * one.slots for one in requests) if hits else 0
        after.append(receive(worker, requests, cached))
    return after


def receive(worker: WorkerView, requests: Sequence[Request], cached_tokens: int = 0) -> WorkerView:
    """The worker with these requests added, of whose prompts it has so many tokens cached."""
    if not requests:
        return worker
    slots = sum(request.slots for request in requests)
    tokens = sum(request.load_tokens for request in requests)
    room, blocks = worker.admissible_tokens, worker.admissible_blocks
    if blocks is not None:
        blocks = max(0, blocks - sum(worker.need(request) for request in requests))
    adapters = worker.adapters
    if worker.max_loras:
        adapters = Counter(adapters) + Counter(filter(None, (one.adapter for one in requests)))
    return structs.replace(
        worker,
        load_tokens=worker.load_tokens + tokens,
        requests=worker.requests + slots,
        capacity=worker.capacity - slots,
        admissible_tokens=None if room is None else max(0, room - tokens),
        pending_prompt_tokens=worker.pending_prompt_tokens + tokens - cached_tokens,
        admissible_blocks=blocks,
        adapters=adapters,
    )


def short_of_places(workers: Sequence[WorkerView], adapters: Set[str]) -> bool:
    """Whether these adapters may be more than a worker has places for beside those there."""
    return bool(adapters) and any(
        one.max_loras and len(adapters | one.adapters.keys()) > one.max_loras for one in workers
    )


def gap_tokens(workers: Sequence[WorkerView]) -> int:
    """Load of the fullest worker less the least load with capacity; at least 0."""
    open_ = [worker.load_tokens for worker in workers if worker.capacity > 0]
    return max([worker.load_tokens for worker in workers]) - min(open_) if open_ else 0
