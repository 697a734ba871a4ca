"""KV memory in a round: which workers may receive what, beside their slots.

Policies know of slots only. So a worker whose memory takes none of the waiting requests is shown to
them without capacity, and what they give to a worker beyond its memory is assigned anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from router.tier import Tier
from router.types import Assignment, Request, WorkerView
from router.workload import Ints


class RoundMemory:
    """What the memory of a group's workers still takes in one round."""

    def __init__(self) -> None:
        self._overfull: set[str] = set()
        self._kept: set[str] = set()

    def reserve(self, overdue: Request, workers: Sequence[WorkerView]) -> None:
        """One has waited too long: unless a worker has room for it, one is kept until it has."""
        free = [worker for worker in workers if worker.capacity > 0]
        if not any(_takes(worker, overdue.load_tokens) for worker in free):
            self.keep_room(workers)

    def takers(self, tier: Tier, workers: Sequence[WorkerView]) -> Sequence[WorkerView]:
        """The workers, without capacity those whose memory takes no request of the tier."""
        if all(worker.admissible_tokens is None for worker in workers):
            return workers
        least = int(_sizes(tier).min())
        closed = self._overfull | self._kept
        return [
            worker
            if worker.id not in closed and _takes(worker, least)
            else replace(worker, capacity=min(0, worker.capacity))
            for worker in workers
        ]

    def ample(self, tier: Tier, workers: Sequence[WorkerView]) -> bool:
        """Whether each worker's memory takes whatever requests of the tier it is given."""
        most = int(_sizes(tier).max(initial=0))
        return all(
            most * min(len(tier), one.capacity) <= room
            for one in workers
            if (room := one.admissible_tokens) is not None and one.capacity > 0
        )

    def fitting(
        self, assignments: Sequence[Assignment], tier: Tier, workers: Sequence[WorkerView]
    ) -> Sequence[Assignment]:
        """Those that fit, in their order; who was given more is not offered again."""
        # Not views that receive: most rounds hand out hundreds, and memory is ample.
        rooms = {w.id: w.admissible_tokens for w in workers if w.admissible_tokens is not None}
        if not rooms:
            return assignments
        idle = {worker.id for worker in workers if not worker.requests}
        kept = []
        for assignment in assignments:
            id_ = assignment.worker_id
            if id_ in rooms:
                tokens = tier.by_id[assignment.request_id].load_tokens
                if tokens > rooms[id_] and id_ not in idle:
                    self._overfull.add(id_)
                    continue
                idle.discard(id_)
                rooms[id_] = max(0, rooms[id_] - tokens)
            kept.append(assignment)
        return kept

    def first_fit(self, tier: Tier, workers: Sequence[WorkerView]) -> list[Assignment]:
        """What still fits when the policy's own choices did not: the oldest request that does."""
        chosen = []
        least = int(_sizes(tier).min())
        free = (one for one in workers if one.capacity > 0 and one.id not in self._kept)
        open_ = [worker for worker in free if _takes(worker, least)]
        most = max(map(_room, open_), default=-1)
        for number in np.flatnonzero(_sizes(tier) <= most):
            request = tier[int(number)]
            for place, worker in enumerate(open_):
                if _takes(worker, request.load_tokens):
                    chosen.append(Assignment(request.id, worker.id))
                    open_[place] = receive(worker, (request,))
                    if open_[place].capacity <= 0 or not _takes(open_[place], least):
                        del open_[place]
                    break
        return chosen

    def keep_room(self, workers: Sequence[WorkerView]) -> None:
        """Some could not enter for want of memory: the roomiest worker is kept for them.

        Else those behind them would take all that becomes free, as long as there are any.
        """
        free = [one for one in workers if one.capacity > 0 and one.id not in self._kept]
        if free:
            self._kept.add(max(free, key=lambda worker: worker.admissible_tokens or 0).id)


def _sizes(tier: Tier) -> Ints:
    """Tokens of each request."""
    return tier.prompt_tokens * tier.slots


def _takes(worker: WorkerView, tokens: int) -> bool:
    return tokens <= _room(worker)


def _room(worker: WorkerView) -> float:
    """Tokens; all where nobody is: whatever fits into an engine at all fits into that one."""
    room = worker.admissible_tokens
    return math.inf if room is None or not worker.requests else room


def receive(worker: WorkerView, requests: Sequence[Request]) -> WorkerView:
    """The worker once the requests are on it."""
    if not requests:
        return worker
    slots = sum(request.slots for request in requests)
    tokens = sum(request.load_tokens for request in requests)
    room = worker.admissible_tokens
    return replace(
        worker,
        load_tokens=worker.load_tokens + tokens,
        requests=worker.requests + slots,
        capacity=worker.capacity - slots,
        admissible_tokens=None if room is None else max(0, room - tokens),
    )
