"""One round: pool and workers in, checked assignments out. No policy is trusted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import accumulate, pairwise

from msgspec.structs import replace

from router.errors import PolicyError
from router.forecast import Outlook
from router.memory import RoundMemory, receive
from router.policy import Policy
from router.tier import Tier
from router.types import Assignment, Request, WorkerView


def assign(
    policy: Policy,
    tiers: Iterable[Sequence[Request]],
    workers: Sequence[WorkerView],
    outlook: Outlook | None = None,
    overdue: Request | None = None,
    askable: Set[str] = frozenset(),
) -> list[Assignment]:
    """Let a policy assign tier after tier while capacity lasts.

    The tiers share the budget of the round by the slots that each of them fills. Where a worker's
    memory may be too small for what it is given, the policy may be asked about a tier more than
    once; then each time has half of what is left of the tier's share.

    Args:
        policy: chooses; if it has a budget for a round, its attribute ``share`` is set to the
            part that it may use for the next call.
        tiers: groups of waiting requests, the more urgent first.
        workers: the live workers of one group.
        outlook: their predicted loads, if there is a look-ahead.
        overdue: one that has waited too long; a worker's memory is kept until it fits, else smaller
            ones would take all that becomes free.
        askable: ids of the workers that take requests, now or soon. Who waits since some of them
            have failed it goes to the others, and waits for these; to any if there are none.

    Raises:
        PolicyError: the policy broke its contract (see ``policy.Policy.assign``).
    """
    in_turn = [Tier.of(tier) for tier in tiers]
    round_ = _Round(policy, workers, outlook, askable)
    if overdue is not None:
        round_.reserve(overdue, in_turn[0])
    shares = _shares(in_turn, workers)
    return [each for turn in zip(in_turn, shares, strict=True) for each in round_.serve(*turn)]


class _Round:
    """The workers and their outlook, as assignments change them."""

    def __init__(
        self,
        policy: Policy,
        workers: Sequence[WorkerView],
        outlook: Outlook | None,
        askable: Set[str],
    ) -> None:
        self._policy = policy
        self._budgeted = policy if hasattr(policy, "share") else None
        self._askable = askable
        self._workers = workers
        self._outlook = outlook
        self._memory = RoundMemory()
        self._last: tuple[Sequence[Assignment], Tier] | None = None

    def reserve(self, overdue: Request, tier: Tier) -> None:
        """Keep room for one, at a worker that its tier may go to."""
        self._memory.reserve(overdue, self._offered(tier))

    def serve(self, tier: Tier, share: float) -> Iterator[Assignment]:
        """Assign a tier; anew what did not fit into the memory of the worker that it was given."""
        while _any_open(offered := self._offered(tier)):
            takers = self._memory.takers(tier, offered)
            if not _any_open(takers):
                yield from self._enter(self._memory.first_fit(tier, offered), tier)
                # One is left at least, or somebody would have been offered it.
                self._memory.keep_room(self._offered(tier))
                break
            if self._budgeted is not None:
                self._budgeted.share = share if self._memory.ample(tier, takers) else share / 2
                share -= self._budgeted.share
            assignments = self._policy.assign(tier, takers, self._outlook)
            _check(assignments, tier, takers)
            fitting = self._memory.fitting(assignments, tier, takers)
            yield from self._enter(fitting, tier)
            if len(fitting) == len(assignments):
                break
            entered = {assignment.request_id for assignment in fitting}
            left = [request for request in tier if request.id not in entered]
            tier = Tier.of(left, tier.avoid, tier.lacks)

    def _enter(self, assignments: Sequence[Assignment], tier: Tier) -> Sequence[Assignment]:
        self._last = assignments, tier
        return assignments

    def _offered(self, tier: Tier) -> Sequence[WorkerView]:
        """The workers, without capacity those that the tier avoids or that lack its model."""
        workers, closed = self._settled(), tier.lacks
        if tier.avoid and self._askable - tier.avoid - closed:
            closed = closed | tier.avoid
        if not closed:
            return workers
        return [
            replace(one, capacity=min(0, one.capacity)) if one.id in closed else one
            for one in workers
        ]

    def _settled(self) -> Sequence[WorkerView]:
        """The workers once the last assignments have been made."""
        if self._last:
            self._workers = _after(*self._last, self._workers)
            self._outlook = self._outlook and self._outlook.after(*self._last, self._workers)
            self._last = None
        return self._workers


def _any_open(workers: Sequence[WorkerView]) -> bool:
    return any(worker.capacity > 0 for worker in workers)


def _shares(tiers: Sequence[Tier], workers: Sequence[WorkerView]) -> list[float]:
    """Of the slots that are filled, those that each tier fills."""
    if len(tiers) == 1:
        return [1.0]
    free = sum(max(0, worker.capacity) for worker in workers)
    asked = accumulate((int(tier.slots.sum()) for tier in tiers), initial=0)
    filled = [min(free, slots) for slots in asked]
    return [(after - before) / (filled[-1] or 1) for before, after in pairwise(filled)]


def _check(assignments: Sequence[Assignment], tier: Tier, workers: Sequence[WorkerView]) -> None:
    """See that the assignments keep the contract."""
    entered: set[str] = set()
    capacity = {worker.id: worker.capacity for worker in workers}
    for request_id, worker_id in assignments:
        request = tier.find(request_id)
        if request is None or request_id in entered:
            raise PolicyError(f"{request_id} is assigned twice, or does not wait")
        if worker_id not in capacity:
            raise PolicyError(f"{worker_id} is not a live worker of the group")
        if capacity[worker_id] <= 0:
            raise PolicyError(f"{worker_id} was given more requests than it has free slots")
        entered.add(request_id)
        capacity[worker_id] -= request.slots
    left = len(tier) - len(entered)
    if left and any(free > 0 for free in capacity.values()):
        raise PolicyError(f"{left} requests are held back while slots are free")


def _after(
    assignments: Sequence[Assignment], tier: Tier, workers: Sequence[WorkerView]
) -> list[WorkerView]:
    """The workers once the assignments have been made."""
    received: dict[str, list[Request]] = {}
    for request_id, worker_id in assignments:
        received.setdefault(worker_id, []).append(tier.by_id[request_id])
    return [receive(worker, received.get(worker.id, ())) for worker in workers]


def gap_tokens(workers: Sequence[WorkerView]) -> int:
    """By how much the least loaded worker with capacity is below the fullest of all; at least 0."""
    open_ = [worker.load_tokens for worker in workers if worker.capacity > 0]
    return max(worker.load_tokens for worker in workers) - min(open_) if open_ else 0
