"""One round: from pool and workers to checked assignments."""

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from itertools import accumulate, pairwise

from msgspec import structs

from router.core.policies.policy_protocol import NOTHING, Known, Policy
from router.core.policies.room import Room, limited
from router.core.queue.tier import Tier
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
) -> list[Assignment]:
    """Let a policy assign tier after tier while capacity lasts, each in one call.

    Tiers share the round's budget in proportion to the slots that each fills.

    If requests of a tier lack memory, later tiers do not receive the worker that has most of it;
    else smaller requests would take all that becomes free. So where memory is limited the oldest
    request is a tier of its own once it has waited past the bound.

    Args:
        policy: if it solves a program, its ``share`` is set for each call.
        tiers: groups of waiting requests, most urgent first.
        workers: live workers of one group.
        known: what the policy may know beyond these views.
        askable: ids of workers that take requests, now or soon. A failed request waits for those
            that it does not avoid; without any it goes to all.
        late_since: if a tier's first request arrived no later, and lacks memory everywhere, neither
            do the others of its tier receive the worker that has most of it.

        aged: the policy weighs how long requests have waited, so none needs a tier of its own.

    Raises:
        PolicyError: the policy broke its contract (see ``Policy.assign``).
    """
    in_turn = [tier if isinstance(tier, Tier) else Tier.of(tier) for tier in tiers]
    memory = limited(workers)
    if memory and in_turn and not aged and in_turn[0][0].arrival_s <= late_since:
        first = in_turn[0]
        parts = first.requests[:1], first.requests[1:]
        in_turn[:1] = [Tier.of(part, first.avoid, first.lacks) for part in parts]
    round_ = _Round(policy, workers, known, askable, late_since, memory=memory)
    shares = [1.0] if len(in_turn) == 1 else _shares(in_turn, workers)
    done: list[Assignment] = []
    for tier, share in zip(in_turn, shares, strict=True):
        done += round_.serve(tier, share)
    return done


class _Round:
    """The workers and what is known of them, as assignments change them.

    ``memory``: true if that of some worker is limited.
    """

    def __init__(
        self,
        policy: Policy,
        workers: Sequence[WorkerView],
        known: Known,
        askable: Set[str],
        late_since: float,
        *,
        memory: bool,
    ) -> None:
        self._policy = policy
        self._askable = askable
        self._late_since = late_since
        self._workers = workers
        self._known = known
        self._last: tuple[Sequence[Assignment], Tier] | None = None
        self._limited = memory
        self._kept: set[str] = set()

    def serve(self, tier: Tier, share: float) -> Sequence[Assignment]:
        if self._last is not None:
            self._receive(*self._last)
        first = tier.requests[:1]
        late = self._limited and bool(first) and first[0].arrival_s <= self._late_since
        if late and self._keep_room(tier, first):
            tier = Tier.of(tier.requests[1:], tier.avoid, tier.lacks)
        workers = self._offered(tier)
        assignments: Sequence[Assignment] = ()
        if any_fits(tier, workers, memory=self._limited):
            if self._policy.solves:
                self._policy.share = share
            assignments = self._policy.assign(tier, workers, self._known)
            check(
                assignments,
                tier,
                workers,
                memory=self._limited,
                busy_from=self._known.busy_from,
            )
        self._last = assignments, tier
        return assignments

    def _receive(self, done: Sequence[Assignment], tier: Tier) -> None:
        """Take the last tier's assignments into account; keep room for those that lack memory."""
        self._workers = _after(done, tier, self._workers, self._known.hits)
        if (outlook := self._known.outlook) is not None:
            outlook = outlook.after(done, tier.by_id, self._workers)
            self._known = replace(self._known, outlook=outlook)
        if self._limited and len(done) < len(tier):
            entered = {request_id for request_id, _ in done}
            self._keep_room(tier, [request for request in tier if request.id not in entered])

    def _keep_room(self, tier: Tier, left: Sequence[Request]) -> bool:
        """Close the roomiest worker of those offered to a tier, if one of these lacks memory."""
        offered = self._offered(tier)
        free = [one for one in offered if one.capacity > 0]
        lacking = bool(free) and len(Room(offered).fitting(left)) < len(left)
        if lacking:
            self._kept.add(max(free, key=lambda worker: worker.admissible or 0).id)
        return lacking

    def _offered(self, tier: Tier) -> Sequence[WorkerView]:
        """Workers that the tier avoids, or that lack its model, or are kept have no capacity."""
        closed = tier.lacks | self._kept
        if tier.avoid and self._askable - tier.avoid - tier.lacks:
            closed = closed | tier.avoid
        if not closed:
            return self._workers
        return [
            structs.replace(one, capacity=min(0, one.capacity)) if one.id in closed else one
            for one in self._workers
        ]


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
    return structs.replace(
        worker,
        load_tokens=worker.load_tokens + tokens,
        requests=worker.requests + slots,
        capacity=worker.capacity - slots,
        admissible_tokens=None if room is None else max(0, room - tokens),
        pending_prompt_tokens=worker.pending_prompt_tokens + tokens - cached_tokens,
        admissible_blocks=blocks,
    )


def gap_tokens(workers: Sequence[WorkerView]) -> int:
    """Load of the fullest worker less the least load with capacity; at least 0."""
    open_ = [worker.load_tokens for worker in workers if worker.capacity > 0]
    return max([worker.load_tokens for worker in workers]) - min(open_) if open_ else 0
