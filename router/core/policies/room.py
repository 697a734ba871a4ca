from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from router.core.forecast.forecast import Bools, Ints
from router.core.kv_blocks import KvBlocks
from router.core.policies.policy_protocol import NOTHING, Known
from router.core.queue.tier import Tier
from router.core.types import Assignment, Request, WorkerView


def limited(workers: Sequence[WorkerView]) -> bool:
    """True if the memory of one of them is known to be limited."""
    # A list and plain attributes: this is on the way of every decision.
    known = [one.admissible_tokens is not None or one.kv is not None for one in workers]
    return True in known


class Room:
    """A mutable copy of the workers of one round, by index.

    One entry per worker; those from ``waiting`` on do not change.
    """

    def __init__(self, workers: Sequence[WorkerView], known: Known = NOTHING) -> None:
        self.known = known
        self.ids = [worker.id for worker in workers]
        self.load_tokens = [worker.load_tokens for worker in workers]
        self.requests = [worker.requests for worker in workers]
        self.capacity = [worker.capacity for worker in workers]
        self.pending = [worker.pending_prompt_tokens for worker in workers]
        self.waiting = [worker.waiting for worker in workers]
        self.kv_usage = [worker.kv_usage for worker in workers]
        self.slots = [worker.slots for worker in workers]
        self.rate = [worker.service_rate for worker in workers]
        self.rate_error = [worker.rate_error for worker in workers]
        self.assignments: list[Assignment] = []
        self._views = workers
        self._limited = limited(workers)
        rooms = [worker.admissible for worker in workers] if self._limited else ()
        self._memory = [math.inf if room is None else room for room in rooms]
        # By what workers count memory in: one of each kind, and the kind of each.
        kinds = {id(worker.kv): worker for worker in workers} if self._limited else {}
        self._kinds = list(kinds.values())
        number = {key: kind for kind, key in enumerate(kinds)}
        self._kind = [number[id(worker.kv)] for worker in workers] if self._limited else []

    @property
    def full(self) -> bool:
        """True if no worker has a slot left."""
        return max(self.capacity, default=0) <= 0

    def open_to(self, request: Request) -> list[int]:
        """Workers with memory for a request, and slots for all of it, else for some."""
        some = [i for i, capacity in enumerate(self.capacity) if capacity > 0]
        if self._limited:  # ``fits``, with each need computed once
            needs = [one.need(request) for one in self._kinds]
            kind, memory, requests = self._kind, self._memory, self.requests
            some = [i for i in some if needs[kind[i]] <= memory[i] or not requests[i]]
        return [i for i in some if self.capacity[i] >= request.slots] or some

    def takers(self, waiting: Sequence[Request]) -> Iterator[tuple[Request, list[int]]]:
        """Requests that fit somewhere, oldest first, with the workers open to each.

        The caller places each. Those that fit nowhere are skipped at once, however many they are.
        """
        at = 0
        needs: Sequence[Ints] = ()
        while at < len(waiting) and not self.full:
            if open_ := self.open_to(waiting[at]):
                yield waiting[at], open_
                at += 1
                continue
            needs = needs or self.needs(waiting)
            fitting = self.fit_somewhere(needs, at)
            at = at + int(fitting.argmax()) if fitting.any() else len(waiting)

    def fitting(self, waiting: Sequence[Request]) -> Sequence[Request]:
        """Those that fit somewhere."""
        if not self._limited:
            return waiting
        fitting = self.fit_somewhere(self.needs(waiting))
        return [waiting[i] for i in np.flatnonzero(fitting).tolist()]

    def needs(self, waiting: Sequence[Request]) -> Sequence[Ints]:
        """Memory that requests take, by what the workers count it in: a row each."""
        tier = Tier.of(waiting)
        return [KvBlocks.needs(one.kv, tier.prompt_tokens, tier.slots) for one in self._kinds]

    def fit_somewhere(self, needs: Sequence[Ints], start: int = 0) -> Bools:
        """Of the requests from ``start`` on, whether a worker with a slot has memory for each."""
        most = [-1.0] * len(needs)
        for i, kind in enumerate(self._kind):
            if self.capacity[i] > 0:
                most[kind] = max(most[kind], self._room(i))
        fitting = np.zeros(len(needs[0]) - start, dtype=np.bool_)
        for row, room in zip(needs, most, strict=True):
            fitting |= row[start:] <= room
        return fitting

    def fit(self, waiting: Sequence[Request]) -> Bools:
        """Shape (R, G): whether each worker has a slot and memory for each request."""
        free = np.array([capacity > 0 for capacity in self.capacity])
        if not self._limited:
            return np.repeat(free[None], len(waiting), axis=0)
        needs = self.needs(waiting)
        fits: Bools = np.array([self.fit_on(i, needs) for i in range(len(free))]).T & free
        return fits

    def fit_on(self, index: int, needs: Sequence[Ints]) -> Bools:
        """``fits``, elementwise."""
        return needs[self._kind[index]] <= self._room(index)

    def fits(self, index: int, request: Request) -> bool:
        """True if a worker has memory for a request; an idle one takes any."""
        room = self._room(index)
        return room == math.inf or self._views[index].need(request) <= room

    def takes(self, index: int, requests: Sequence[Request]) -> bool:
        """True if a worker has memory for requests together."""
        if len(requests) == 1:
            return self.fits(index, requests[0])
        room = self._memory[index] if self._limited else math.inf
        return room == math.inf or sum(map(self._views[index].need, requests)) <= room

    def _room(self, index: int) -> float:
        return self._memory[index] if self._limited and self.requests[index] else math.inf

    def ahead(self, index: int, request: Request) -> int:
        """Engine requests that must leave before all of a request can run: (Z - c + 1)^+."""
        return max(0, self.requests[index] + request.slots - self.slots[index])

    def idle(self, request: Request, open_: Sequence[int]) -> Sequence[int]:
        """Workers that would run it at once, else those that would run a part, else all."""
        some = [i for i in open_ if self.requests[i] < self.slots[i]]
        return [i for i in some if not self.ahead(i, request)] or some or open_

    def cached(self, index: int, request: Request) -> int:
        """Tokens of a request's prompt that a worker has cached; 0 if unknown."""
        return self.known.hits(request)[index] if self.known.hits else 0

    def own_work(self, index: int, request: Request) -> int:
        """Prompt tokens of this request that a worker would have to compute."""
        return request.load_tokens - self.cached(index, request) * request.slots

    def prompt_work(self, index: int, request: Request) -> int:
        """Prompt tokens that a worker would have to compute with this request."""
        return self.pending[index] + self.own_work(index, request)

    def place(self, index: int, request: Request) -> None:
        self.pending[index] = self.prompt_work(index, request)
        self.load_tokens[index] += request.load_tokens
        self.requests[index] += request.slots
        self.capacity[index] -= request.slots
        if self._limited:
            self._memory[index] -= self._views[index].need(request)
        self.assignments.append(Assignment(request.id, self.ids[index]))
