"""One round: pool and workers in, checked assignments out. No policy is trusted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Protocol, runtime_checkable

from router.errors import PolicyError
from router.forecast import Outlook
from router.types import Assignment, Policy, Request, WorkerView

_ID, _SLOTS = attrgetter("id"), attrgetter("slots")


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
    received: dict[str, list[Request]] = {}
    last: tuple[Sequence[Assignment], Sequence[Request]] = (), ()
    tiers = list(tiers)
    for tier, share in zip(tiers, _shares(tiers, workers), strict=True):
        if received:
            workers = [receive(worker, received.get(worker.id, ())) for worker in workers]
            outlook = outlook and outlook.after(*last, workers)
        if not any(worker.capacity > 0 for worker in workers):
            break
        if isinstance(policy, Budgeted):
            policy.share = share
        assignments = policy.assign(tier, workers, outlook)
        received = _checked(assignments, tier, workers)
        chosen.extend(assignments)
        last = assignments, tier
    return chosen


def _shares(tiers: Sequence[Sequence[Request]], workers: Sequence[WorkerView]) -> list[float]:
    """Of the slots that are filled, those that each tier fills."""
    if len(tiers) == 1:
        return [1.0]
    free = sum(max(0, worker.capacity) for worker in workers)
    asked = accumulate((sum(map(_SLOTS, tier)) for tier in tiers), initial=0)
    filled = [min(free, slots) for slots in asked]
    return [(after - before) / (filled[-1] or 1) for before, after in pairwise(filled)]


def _checked(
    assignments: Iterable[Assignment], tier: Sequence[Request], workers: Sequence[WorkerView]
) -> dict[str, list[Request]]:
    """What each worker receives, if the assignments keep the contract."""
    waiting = dict(zip(map(_ID, tier), tier, strict=True))
    capacity = {worker.id: worker.capacity for worker in workers}
    received: dict[str, list[Request]] = {}
    for request_id, worker_id in assignments:
        request = waiting.pop(request_id, None)
        if request is None:
            raise PolicyError(f"{request_id} is assigned twice, or does not wait")
        if worker_id not in capacity:
            raise PolicyError(f"{worker_id} is not a live worker of the group")
        if capacity[worker_id] <= 0:
            raise PolicyError(f"{worker_id} was given more requests than it has free slots")
        capacity[worker_id] -= request.slots
        received.setdefault(worker_id, []).append(request)
    if waiting and any(free > 0 for free in capacity.values()):
        raise PolicyError(f"{len(waiting)} requests are held back while slots are free")
    return received


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
