"""Checks of a policy's answer. No policy is trusted."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from router.core.errors import PolicyError
from router.core.kv_blocks import KvBlocks
from router.core.queue.tier import Tier
from router.core.types import Assignment, Request, WorkerView


def check(
    assignments: Sequence[Assignment],
    tier: Tier,
    workers: Sequence[WorkerView],
    *,
    memory: bool,
    busy_from: float = math.inf,
) -> None:
    """Check the contract of ``Policy.assign``.

    Args:
        assignments: the answer.
        tier: the requests.
        workers: those offered.
        memory: true if a worker's is limited.
        busy_from: pending prompt tokens from which on requests may wait for a worker.

    Raises:
        PolicyError: it is broken.
    """
    capacity = {worker.id: worker.capacity for worker in workers}
    entered: dict[str, Request] = {}
    by_id = tier.by_id
    for request_id, worker_id in assignments:
        request, free = by_id.get(request_id), capacity.get(worker_id)
        if request is None or request_id in entered:
            raise PolicyError(f"{request_id} is assigned twice, or does not wait")
        if free is None:
            raise PolicyError(f"{worker_id} is not a live worker of the group")
        if free <= 0:
            raise PolicyError(f"{worker_id} was given more requests than it has free slots")
        entered[request_id] = request
        capacity[worker_id] = free - request.slots
    if memory:
        left = _check_memory(assignments, entered, tier, workers, capacity)
    else:
        left = len(tier) - len(entered) if max(capacity.values()) > 0 else 0
    if left and not _any_busy(assignments, by_id, workers, busy_from):
        raise PolicyError(f"{left} requests are held back that a worker could take")


def _any_busy(
    assignments: Sequence[Assignment],
    by_id: Mapping[str, Request],
    workers: Sequence[WorkerView],
    busy_from: float,
) -> bool:
    """True if a worker has prompts to compute for a step, or would have without its cache."""
    if math.isinf(busy_from):
        return False
    pending = {worker.id: worker.pending_prompt_tokens for worker in workers}
    for request_id, worker_id in assignments:
        pending[worker_id] += by_id[request_id].load_tokens
    return max(pending.values()) >= busy_from


def any_fits(tier: Tier, workers: Sequence[WorkerView], *, memory: bool) -> bool:
    """True if a worker can take one of these requests; ``memory`` as above."""
    capacity = {worker.id: worker.capacity for worker in workers}
    if not tier or max(capacity.values(), default=0) <= 0:
        return False
    if not memory or any(worker.takes(tier[0]) for worker in workers):
        return True
    return _check_memory((), {}, tier, workers, capacity) > 0


def _check_memory(
    assignments: Sequence[Assignment],
    entered: Mapping[str, Request],
    tier: Tier,
    workers: Sequence[WorkerView],
    capacity: Mapping[str, int],
) -> int:
    """Number of requests left for which a worker with capacity left has memory."""
    held_back = 0
    prompts = np.array([one.prompt_tokens for one in entered.values()], dtype=np.int64)
    slots = np.array([one.slots for one in entered.values()], dtype=np.int64)
    for kv, alike in _by_kv(workers):
        free = {one.id: math.inf if (room := one.admissible) is None else room for one in alike}
        needs = KvBlocks.needs(kv, prompts, slots)
        idle = {worker.id for worker in alike if not worker.requests}
        for (_, worker_id), need in zip(assignments, needs.tolist(), strict=True):
            if worker_id not in free:
                continue
            free[worker_id] -= need
            if worker_id in idle:
                idle.remove(worker_id)
            elif free[worker_id] < 0:
                raise PolicyError(f"{worker_id} was given more than its memory")
        open_ = [worker.id for worker in alike if capacity[worker.id] > 0]
        most = max([math.inf if id_ in idle else free[id_] for id_ in open_], default=-1.0)
        fitting = np.count_nonzero(KvBlocks.needs(kv, tier.prompt_tokens, tier.slots) <= most)
        held_back = max(held_back, int(fitting) - int(np.count_nonzero(needs <= most)))
    return held_back


def _by_kv(
    workers: Sequence[WorkerView],
) -> Sequence[tuple[KvBlocks | None, Sequence[WorkerView]]]:
    """The workers by what they count memory in; mostly that is the same."""
    first = workers[0].kv
    if all([worker.kv is first for worker in workers]):  # noqa: C419 - faster
        return [(first, workers)]
    kinds = {worker.kv for worker in workers}
    return [(kv, [worker for worker in workers if worker.kv == kv]) for kv in kinds]
