"""Checks of a policy's answer. No policy is trusted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from router.core.errors import PolicyError
from router.core.kv_blocks import KvBlocks
from router.core.queue.tier import Tier
from router.core.types import Assignment, WorkerView

_UNLIMITED = 1 << 60


def check(
    assignments: Sequence[Assignment], tier: Tier, workers: Sequence[WorkerView], *, limited: bool
) -> None:
    """Check the contract of ``Policy.assign``; ``limited``: a worker's memory is known.

    Raises:
        PolicyError: it is broken.
    """
    capacity = {worker.id: worker.capacity for worker in workers}
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
    if limited:
        open_ = np.array([capacity[worker.id] > 0 for worker in workers])
        left = _check_memory(assignments, tier, workers, open_)
    elif max(capacity.values()) <= 0:
        left = 0
    if left:
        raise PolicyError(f"{left} requests are held back that a worker could take")


def _check_memory(
    assignments: Sequence[Assignment],
    tier: Tier,
    workers: Sequence[WorkerView],
    open_: np.ndarray[tuple[int], np.dtype[np.bool_]],
) -> int:
    """Number of requests left for which an open worker has memory."""
    index = {worker.id: at for at, worker in enumerate(workers)}
    place = np.array([index[worker_id] for _, worker_id in assignments], dtype=np.int64)
    requests = Tier.of([tier.by_id[request_id] for request_id, _ in assignments])
    number = np.bincount(place, minlength=len(workers))
    free = np.array([_UNLIMITED if one.admissible is None else one.admissible for one in workers])
    idle = np.array([not worker.requests for worker in workers])
    held_back: set[str] = set()
    for kv in {worker.kv for worker in workers}:
        mine = np.array([worker.kv == kv for worker in workers])
        needs = KvBlocks.needs(kv, requests.prompt_tokens, requests.slots)
        room = free - np.bincount(place, needs, len(workers)).astype(np.int64)
        over = mine & (room < 0) & (number > idle)
        if over.any():
            raise PolicyError(f"{workers[int(over.argmax())].id} was given more than its memory")
        room[idle & (number == 0)] = _UNLIMITED
        most = room[mine & open_].max(initial=-1)
        fitting = np.flatnonzero(KvBlocks.needs(kv, tier.prompt_tokens, tier.slots) <= most)
        held_back.update(tier[at].id for at in fitting.tolist())
    return len(held_back - requests.by_id.keys())
