"""One round: from pool and workers to checked assignments. No policy is trusted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace
from itertools import accumulate, pairwise

from msgspec import structs

from router.core.errors import PolicyError
from router.core.policies.policy_protocol import NOTHING, Known, Policy
from router.core.queue.tier import Tier
from router.core.rounds.round_memory import RoundMemory, receive
from router.core.types import Assignment, Hits, Request, WorkerView


def assign(
    policy: Policy,
    tiers: Iterable[Sequence[Request]],
    workers: Sequence[WorkerView],
    known: Known = NOTHING,
    overdue: Request | None = None,
    askable: Set[str] = frozenset(),
) -> list[Assignment]:
    """Let a policy assign tier after tier while capacity lasts.

    Tiers share the round's budget in proportion to the slots that each fills. If a worker's memory
    may be too small, the policy may run again for a tier; each run then has half of the tier's
    remaining share.

    Args:
        policy: if it solves a program, its ``share`` is set for each call.
        tiers: groups of waiting requests, most urgent first.
        workers: live workers of one group.
        known: what the policy may know beyond these views.
        overdue: request without patience; a worker's memory is kept until it fits, else smaller
            requests would take all that becomes free.
        askable: ids of workers that take requests, now or soon. A failed request waits for those
            that it does not avoid; without any it goes to all.

    Raises:
        PolicyError: the policy broke its contract (see ``Policy.assign``).
    """
    in_turn = [tier if isinstance(tier, Tier) else Tier.of(tier) for tier in tiers]
    round_ = _Round(policy, workers, known, askable)
    if overdue is not None and round_.memory is not None:
        round_.memory.reserve(overdue, round_.offered(in_turn[0]))
    shares = [1.0] if len(in_turn) == 1 else _shares(in_turn, workers)
    done: list[Assignment] = []
    for tier, share in zip(in_turn, shares, strict=True):
        done += round_.serve(tier, share) if round_.memory is None else round_.fit(tier, share)
    return done


class _Round:
    """The workers and what is known of them, as assignments change them.

    ``memory`` is None if no worker's KV memory is known to be limited.
    """

    def __init__(
        self,
        policy: Policy,
        workers: Sequence[WorkerView],
        known: Known,
        askable: Set[str],
    ) -> None:
        self._policy = policy
        self._askable = askable
        self._workers = workers
        self._known = known
        self._last: tuple[Sequence[Assignment], Tier] | None = None
        limited = [one.id for one in workers if one.admissible_tokens is not None]
        self.memory = RoundMemory() if limited else None

    def serve(self, tier: Tier, share: float) -> Sequence[Assignment]:
        assignments = self._choose(tier, self.offered(tier), share)
        self._last = assignments, tier
        return assignments

    def fit(self, tier: Tier, share: float) -> Iterator[Assignment]:
        """Assign a tier; repeat for requests that exceeded a worker's memory."""
        assert self.memory is not None
        while _any_open(offered := self.offered(tier)):
            takers = self.memory.takers(tier, offered)
            if not _any_open(takers):
                fitting: Sequence[Assignment] = self.memory.first_fit(tier, offered)
                self._last = fitting, tier
                yield from fitting
                # At least one is left, or a worker would have been offered.
                self.memory.keep_room(self.offered(tier))
                break
            part = share if self.memory.ample(tier, takers) else share / 2
            share -= part
            assignments = self._choose(tier, takers, part)
            fitting = self.memory.fitting(assignments, tier, takers)
            self._last = fitting, tier
            yield from fitting
            if len(fitting) == len(assignments):
                break
            entered = {assignment.request_id for assignment in fitting}
            left = [request for request in tier if request.id not in entered]
            tier = Tier.of(left, tier.avoid, tier.lacks)

    def offered(self, tier: Tier) -> Sequence[WorkerView]:
        """Workers that the tier avoids, or that lack its model, have no capacity."""
        if self._last:
            done, entered = self._last
            self._workers = _after(done, entered, self._workers, self._known.hits)
            if (outlook := self._known.outlook) is not None:
                outlook = outlook.after(done, entered.by_id, self._workers)
                self._known = replace(self._known, outlook=outlook)
            self._last = None
        closed = tier.lacks
        if tier.avoid and self._askable - tier.avoid - closed:
            closed = closed | tier.avoid
        if not closed:
            return self._workers
        return [
            structs.replace(one, capacity=min(0, one.capacity)) if one.id in closed else one
            for one in self._workers
        ]

    def _choose(
        self, tier: Tier, workers: Sequence[WorkerView], share: float
    ) -> Sequence[Assignment]:
        """Checked; none without capacity."""
        capacity = {worker.id: worker.capacity for worker in workers}
        if max(capacity.values(), default=0) <= 0:
            return ()
        if self._policy.solves:
            self._policy.share = share
        assignments = self._policy.assign(tier, workers, self._known)
        entered: set[str] = set()
        by_id, others = tier.by_id, tier.others
        for request_id, worker_id in assignments:
            request, free = by_id.get(request_id), capacity.get(worker_id)
            if request is None or request_id in entered or request_id in others:
                raise PolicyError(f"{request_id} is assigned twice, or does not wait")
            if free is None:
                raise PolicyError(f"{worker_id} is not a live worker of the group")
            if free <= 0:
                raise PolicyError(f"{worker_id} was given more requests than it has free slots")
            entered.add(request_id)
            capacity[worker_id] = free - request.slots
        left = len(tier.requests) - len(entered)
        if left and max(capacity.values()) > 0:
            raise PolicyError(f"{left} requests are held back while slots are free")
        return assignments


def _any_open(workers: Sequence[WorkerView]) -> bool:
    return any(worker.capacity > 0 for worker in workers)


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


def gap_tokens(workers: Sequence[WorkerView]) -> int:
    """Load of the fullest worker less the least load with capacity; at least 0."""
    open_ = [worker.load_tokens for worker in workers if worker.capacity > 0]
    return max([worker.load_tokens for worker in workers]) - min(open_) if open_ else 0
