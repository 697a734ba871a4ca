"""One round: pool and workers in, checked assignments out. No policy is trusted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from router.errors import PolicyError
from router.types import Assignment, Policy, Request, WorkerView


def assign(
    policy: Policy, tiers: Iterable[Sequence[Request]], workers: Sequence[WorkerView]
) -> list[Assignment]:
    """Let a policy assign tier after tier while capacity lasts.

    Args:
        policy: who chooses.
        tiers: groups of waiting requests, the more urgent first.
        workers: the live workers of one group.

    Raises:
        PolicyError: the policy broke its contract (see ``types.Policy.assign``).
    """
    chosen: list[Assignment] = []
    for tier in tiers:
        if not any(worker.capacity > 0 for worker in workers):
            break
        assignments = policy.assign(tier, workers)
        workers = _check(assignments, tier, workers)
        chosen.extend(assignments)
    return chosen


def _check(
    assignments: Iterable[Assignment], tier: Sequence[Request], workers: Sequence[WorkerView]
) -> list[WorkerView]:
    """The workers as the assignments leave them, if these keep the contract."""
    waiting = {request.id: request for request in tier}
    after = {worker.id: worker for worker in workers}
    for assignment in assignments:
        request = waiting.pop(assignment.request_id, None)
        if request is None:
            raise PolicyError(f"{assignment.request_id} is assigned twice, or does not wait")
        worker = after.get(assignment.worker_id)
        if worker is None:
            raise PolicyError(f"{assignment.worker_id} is not a live worker of the group")
        if worker.capacity <= 0:
            raise PolicyError(f"{worker.id} was given more requests than it has free slots")
        after[worker.id] = receive(worker, request)
    if waiting and any(worker.capacity > 0 for worker in after.values()):
        raise PolicyError(f"{len(waiting)} requests are held back while slots are free")
    return list(after.values())


def gap_tokens(workers: Sequence[WorkerView]) -> int:
    """By how much the least loaded worker with capacity is below the fullest of all; at least 0."""
    open_ = [worker.load_tokens for worker in workers if worker.capacity > 0]
    return max(worker.load_tokens for worker in workers) - min(open_) if open_ else 0


def receive(worker: WorkerView, request: Request) -> WorkerView:
    """The worker once the request is on it."""
    return replace(
        worker,
        load_tokens=worker.load_tokens + request.load_tokens,
        requests=worker.requests + request.slots,
        capacity=worker.capacity - request.slots,
    )
