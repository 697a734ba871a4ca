"""KV memory in a round: what each worker can receive, beside its slots.

Policies know slots only. A worker whose memory admits no waiting request is shown without capacity;
assignments beyond it are repeated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from router.core.forecast.forecast import Ints
from router.core.queue.tier import Tier
from router.core.types import Assignment, Request, WorkerView


class RoundMemory:
    """KV memory left on a group's workers in one round."""

    def __init__(self) -> None:
        self._overfull: set[str] = set()
        self._kept: set[str] = set()

    def reserve(self, overdue: Request, workers: Sequence[WorkerView]) -> None:
        """Keep a worker for an overdue request, unless it fits somewhere."""
        free = [worker for worker in workers if worker.capacity > 0]
        if not any(_takes(worker, overdue.load_tokens) for worker in free):
            self.keep_room(workers)

    def takers(self, tier: Tier, workers: Sequence[WorkerView]) -> Sequence[WorkerView]:
        """Workers whose memory admits no request of the tier have no capacity."""
        least = int(_sizes(tier).min())
        closed = self._overfull | self._kept
        return [
            worker
            if worker.id not in closed and _takes(worker, least)
            else replace(worker, capacity=min(0, worker.capacity))
            for worker in workers
        ]

    def ample(self, tier: Tier, workers: Sequence[WorkerView]) -> bool:
        """True if each worker's memory admits any choice of requests of the tier."""
        most = int(_sizes(tier).max(initial=0))
        return all(
            most * min(len(tier), one.capacity) <= room
            for one in workers
            if (room := one.admissible_tokens) is not None and one.capacity > 0
        )

    def fitting(
        self, assignments: Sequence[Assignment], tier: Tier, workers: Sequence[WorkerView]
    ) -> Sequence[Assignment]:
        """Assignments that fit; a worker given more is not offered again."""
        # Not by ``receive``: a round may assign hundreds.
        rooms = {w.id: w.admissible_tokens for w in workers if w.admissible_tokens is not None}
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
        """Assign the oldest requests that fit where the policy's own choices did not."""
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
        """Keep the roomiest worker for requests that lack memory.

        Else those behind them would take all memory that becomes free.
        """
        free = [one for one in workers if one.capacity > 0 and one.id not in self._kept]
        if free:
            self._kept.add(max(free, key=lambda worker: worker.admissible_tokens or 0).id)


def _sizes(tier: Tier) -> Ints:
    return tier.prompt_tokens * tier.slots


def _takes(worker: WorkerView, tokens: int) -> bool:
    return tokens <= _room(worker)


def _room(worker: WorkerView) -> float:
    """Tokens admitted; unlimited on an idle worker, which admits whatever fits at all."""
    room = worker.admissible_tokens
    return math.inf if room is None or not worker.requests else room


def receive(worker: WorkerView, requests: Sequence[Request], cached_tokens: int = 0) -> WorkerView:
    """The worker with these requests added, of whose prompts it has so many tokens cached."""
    if not requests:
        return worker
    slots = sum(request.slots for request in requests)
    tokens = sum(request.load_tokens for request in requests)
    room, blocks = worker.admissible_tokens, worker.admissible_blocks
    if blocks is not None:
        blocks = max(0, blocks - sum(worker.need(request) for request in requests))
    return replace(
        worker,
        load_tokens=worker.load_tokens + tokens,
        requests=worker.requests + slots,
        capacity=worker.capacity - slots,
        admissible_tokens=None if room is None else max(0, room - tokens),
        pending_prompt_tokens=worker.pending_prompt_tokens + tokens - cached_tokens,
        admissible_blocks=blocks,
    )
