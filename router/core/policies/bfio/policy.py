"""BF-IO (arXiv 2601.17855, section 4): the whole pool at once, by ``solver``'s integer program.

Loads are the outlook's over its look-ahead; without one, the views' loads and H = 0. The program's
quadratic term is not in the paper: all fillings under the maximum have equal imbalance, so it
breaks ties. Where workers compute prompts the plan of ``prompt_plan`` decides instead, unless
requests wait for slots and caches hardly differ. Deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat

import numpy as np

from router.core.forecast.forecast import Floats, Ints, Outlook, WorkProfile
from router.core.kv_blocks import KvBlocks
from router.core.policies.baselines import PerRequest, fcfs, least_tokens
from router.core.policies.bfio.prompt_plan import planned
from router.core.policies.bfio.solver import DEFAULT_MOVES, UNLIMITED, Instance, Memory, solve
from router.core.policies.policy_protocol import NOTHING, Decision, Known, Policy
from router.core.policies.room import limited
from router.core.queue.tier import Tier
from router.core.types import Assignment, Request, WorkerView


class BfIo(Policy):
    """Assigns the pool jointly.

    Args:
        tie_weight: mu of the quadratic term without an outlook, in 1/tokens.
        moves: budget of the local search per round, in computed costs.
    """

    solves = True

    def __init__(self, tie_weight: float = 0.1, moves: int = DEFAULT_MOVES) -> None:
        self._tie_weight = tie_weight
        self._moves = moves

    def assign(
        self,
        waiting: Sequence[Request],
        workers: Sequence[WorkerView],
        known: Known = NOTHING,
    ) -> Sequence[Assignment]:
        self.last, outlook = None, known.outlook
        # A single worker has nothing to balance, and serves by age.
        if len(workers) < 2:
            return PerRequest(fcfs).assign(waiting, workers)
        memory = limited(workers)
        # A candidate has one need; engines that count differently hardly meet in a group.
        if memory and len({one.kv for one in workers if one.admissible is not None}) > 1:
            return PerRequest(least_tokens).assign(waiting, workers)
        if outlook is None:
            loads = np.array([[worker.load_tokens] for worker in workers], dtype=np.float64)
            outlook = Outlook(loads, WorkProfile(), discount=1.0, tie_weight=self._tie_weight)
        tier = waiting if isinstance(waiting, Tier) else Tier.of(waiting)
        if outlook.profile.prefill_beta > 0 and not known.slots_first:
            return planned(tier, workers, known, outlook.profile)
        wide = bool((tier.slots > 1).any())
        if wide:
            # Ties go to the first worker; sorting makes the configured order irrelevant.
            order = sorted(range(len(workers)), key=lambda i: (workers[i].load_tokens, i))
            workers = [workers[i] for i in order]
            outlook = replace(outlook, work=outlook.work[order])
        done = _Placement(workers, outlook, memory=memory)
        narrow = done.place_wide(tier) if wide else tier
        instance = done.instance(narrow)
        solution = solve(instance, int(self.share * self._moves))
        self.last = Decision(instance, solution)
        self.spent += solution.moves
        done.place(narrow.requests, solution.places)
        return done.assignments


class _Placement:
    """``memory``: true if it is limited; all workers with a limit count alike."""

    def __init__(self, workers: Sequence[WorkerView], outlook: Outlook, *, memory: bool) -> None:
        self._ids = [worker.id for worker in workers]
        self._capacity = np.array([worker.capacity for worker in workers], dtype=np.int64)
        self._loads = outlook.work + outlook.lead_tokens * (self._capacity > 0)[:, None]
        self._outlook = outlook
        self._weights = outlook.discount ** np.arange(outlook.work.shape[1], dtype=np.float64)
        self._limited = memory
        if memory:
            self._kv = next((worker.kv for worker in workers if worker.kv is not None), None)
            rooms = [worker.admissible for worker in workers]
            self._room = np.array([UNLIMITED if room is None else room for room in rooms])
            self._idle = np.array([not worker.requests for worker in workers])
        self.assignments: list[Assignment] = []

    def instance(self, requests: Tier) -> Instance:
        prompts, memory = requests.prompt_tokens, None
        if self._limited:
            needs = KvBlocks.needs(self._kv, prompts, requests.slots)
            memory = Memory(self._room, needs, self._idle)
        return Instance(
            loads=self._loads,
            candidates=self._outlook.profile.work(prompts, prompts, len(self._weights)),
            capacity=self._capacity,
            weights=self._weights,
            tie_weight=self._outlook.tie_weight,
            alike=prompts,
            memory=memory,
        )

    def place(self, requests: Sequence[Request], places: Ints) -> None:
        """Assign requests to the workers at these indices, -1 for none."""
        entered = np.flatnonzero(places >= 0)
        ids = [requests[i].id for i in entered.tolist()]
        worker_ids = map(self._ids.__getitem__, places[entered].tolist())
        # Same as Assignment(…), in half the time: there may be hundreds.
        self.assignments += map(
            tuple.__new__, repeat(Assignment), zip(ids, worker_ids, strict=True)
        )

    def place_wide(self, requests: Tier) -> Tier:
        """Place requests of several slots where the objective grows least; return the others."""
        wide = Tier.of([request for request in requests if request.slots > 1])
        needs = wide.prompt_tokens
        if self._limited:
            needs = KvBlocks.needs(self._kv, wide.prompt_tokens, wide.slots)
        rows = self._outlook.request_work(wide)
        for request, row, need in zip(wide, rows, needs.tolist(), strict=True):
            some = self._capacity > 0
            if self._limited:
                some &= self._idle | (need <= self._room)
            wide_enough = some & (self._capacity >= request.slots)
            open_ = np.flatnonzero(wide_enough if wide_enough.any() else some)
            if not len(open_):
                continue
            place = self._cheapest(row, open_)
            self.place([request], np.array([place]))
            self._loads[place] += row
            self._capacity[place] -= request.slots
            if self._limited:
                self._room[place] -= need
                self._idle[place] = False
        return Tier.of([request for request in requests if request.slots == 1])

    def _cheapest(self, row: Floats, open_: Ints) -> int:
        instance = Instance(
            self._loads, row[None], self._capacity, self._weights, self._outlook.tie_weight
        )
        costs = [instance.objective(np.array([place])) for place in open_]
        return int(open_[np.argmin(costs)])
