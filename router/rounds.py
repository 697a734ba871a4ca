"""One round: pool and workers in, checked assignments out. No policy is trusted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Protocol, runtime_checkable

from router.errors import PolicyError
from router.forecast import Outlook
from router.tier import Tier
from router.types import Assignment, Policy, Request, WorkerView


@runtime_checkable
class Budgeted(Protocol):
    """A policy with a budget for a round; ``share`` is what it may use of it for the next tier."""

    share: float


def assign(
    policy: Policy,
    tiers: Iterable[Sequence[Request]],
    workers: Sequence[WorkerView],
    outlook: Outlook | None = None,
) -> list[Assignment]:
    """Let a policy assign tier after tier while capacity lasts.

    A budget for the round is divided among the tiers by the slots that each of them fills.

    Args:
        policy: who chooses.
        tiers: groups of waiting requests, the more urgent first.
        workers: the live workers of one group.
        outlook: their predicted loads, if there is a look-ahead.

    Raises:
        PolicyError: the policy broke its contract (see ``types.Policy.assign``).
    """
    chosen: list[Assignment] = []
    last: tuple[Sequence[Assignment], Tier] | None = None
    in_turn = [Tier.of(tier) for tier in tiers]
    for tier, share in zip(in_turn, _shares(in_turn, workers), strict=True):
        if last:
            workers = _after(*last, workers)
            outlook = outlook and outlook.after(*last, workers)
        if not any(worker.capacity > 0 for worker in workers):
            break
        if isinstance(policy, Budgeted):
            policy.share = share
        assignments = policy.assign(tier, workers, outlook)
        _check(assignments, tier, workers)
        chosen.extend(assignments)
        last = assignments, tier
    return chosen


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


def receive(worker: WorkerView, requests: Sequence[Request]) -> WorkerView:
    """The worker once the requests are on it."""
    if not requests:
        return worker
    slots = sum(request.slots for request in requests)
    return replace(
        worker,
        load_tokens=worker.load_tokens + sum(request.load_tokens for request in requests),
        requests=worker.requests + slots,
        capacity=worker.capacity - slots,
    )
