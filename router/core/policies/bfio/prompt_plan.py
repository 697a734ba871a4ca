"""The plan for prompts: which waiting request is computed where, and which are sent now.

Where workers compute prompts, a placement costs the time that it adds at the barrier, as in
``prompts.barrier_time``: on worker g, in KV tokens' worth,

    beta (pending_g + s_i - hit_ig) + D max(0, L_g + s_i - max L)

with beta = t_p / t_l. All waiting requests are planned, on busy workers too, since a request may be
computed sooner behind others where its prefix is cached than at once where it is not. Only what a
worker needs for its next step is sent. The rest waits in the router and is planned anew at the next
step: late binding. The least cost goes first, less the time waited, so that short prompts do not
wait for long ones and nobody waits for ever. The rule is our own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from router.core.forecast.forecast import Bools, Floats, Ints, WorkProfile
from router.core.policies.policy_protocol import Known
from router.core.policies.prompts import EXCESS_STEPS
from router.core.policies.room import Room
from router.core.queue.tier import Tier
from router.core.types import Assignment, WorkerView

# Of two workers of equal cost the one with the smaller load, at a price that decides nothing else.
_TIE = 1e-6

# Candidates of a round, the oldest: as many, or as many for each open worker.
_CANDIDATES, _CANDIDATES_EACH = 64, 2


def planned(
    tier: Tier, workers: Sequence[WorkerView], known: Known, profile: WorkProfile
) -> Sequence[Assignment]:
    """Requests that the plan sends now; where requests may not wait, all."""
    room = Room(workers, known)
    open_ = sum([worker.pending_prompt_tokens < known.busy_from for worker in workers])
    left = list(islice(tier, max(_CANDIDATES, _CANDIDATES_EACH * open_)))
    while left:
        plan = _plan(Tier.of(left), room, profile)
        refused = False
        sent = set()
        for row, worker in plan.sent():
            if room.capacity[worker] > 0 and room.fits(worker, left[row]):
                room.place(worker, left[row])
                sent.add(row)
            else:
                refused = True
        # Whom a worker has no room for, after all, may go to another.
        left = [request for row, request in enumerate(left) if row not in sent] if refused else []
    return room.assignments


def _plan(waiting: Tier, room: Room, profile: WorkProfile) -> PromptPlan:
    known, beta = room.known, profile.prefill_beta
    sizes = waiting.prompt_tokens * waiting.slots
    work = beta * np.repeat(sizes[:, None], len(room.ids), axis=1)
    if known.hits is not None:
        hits = np.array([known.hits(each) for each in waiting], dtype=np.float64)
        work -= beta * waiting.slots[:, None] * hits
    waited = np.zeros(len(waiting))
    if known.step_time is not None and known.step_time.per_prompt_token_s:
        seconds = known.now_s - np.array([request.arrival_s for request in waiting])
        waited = seconds * beta / known.step_time.per_prompt_token_s
    return PromptPlan(
        work,
        sizes,
        waited,
        pending=beta * np.array(room.pending, dtype=np.float64),
        loads=np.array(room.load_tokens, dtype=np.float64),
        open_below=beta * known.busy_from,
        fits=room.fit(waiting),
        barrier=known.barrier,
    )


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """One decision: R requests, G workers; in KV tokens' worth unless said.

    Attributes:
        work: shape (R, G), beta times the prompt tokens that each worker would compute of each.
        sizes: shape (R,), KV tokens that each request adds.
        waited: shape (R,), time that each has waited.
        pending: shape (G,), beta times the prompt tokens that each worker has yet to compute.
        loads: shape (G,), KV tokens.
        open_below: a worker with less pending is sent more.
        fits: shape (R, G), whether a worker could take the request, with a slot and memory.
        barrier: whether workers wait for each other; else each load costs its own worker alone.
    """

    work: Floats
    sizes: Ints
    waited: Floats
    pending: Floats
    loads: Floats
    open_below: float
    fits: Bools
    barrier: bool = True

    def sent(self) -> Iterator[tuple[int, int]]:
        """Requests to send now, and their workers, in the order of the plan.

        The request of least cost goes first, then the next, by costs with those before it. A pass
        does many of these steps at once: until the first request that the ones before it send to
        another worker.
        """
        pending, loads = self.pending.copy(), self.loads.copy()
        left = np.flatnonzero(self.fits.any(axis=1))
        best, least, other = self._best(left, pending, loads)
        while len(left) and (pending < self.open_below).any():
            order = np.lexsort((left, least - self.waited[left], best))
            workers, requests = best[order], left[order]
            work, waited = self.work[requests, workers], self.waited[requests]
            first = np.concatenate(([True], workers[1:] != workers[:-1]))
            before = _before(work, first)
            here, elsewhere = least[order] + before, other[order]
            # Whoever is better off elsewhere comes before those that are due later there.
            moves = elsewhere < here
            due = np.min(elsewhere[moves] - waited[moves], initial=np.inf)
            taken = ~moves & (here - waited <= due)
            ahead = pending[workers] + before
            for at in np.flatnonzero(taken & (ahead < self.open_below)).tolist():
                yield int(requests[at]), int(workers[at])
            fullest = loads.max()
            np.add.at(pending, workers[taken], work[taken])
            np.add.at(loads, workers[taken], self.sizes[requests[taken]])
            kept = np.ones(len(left), dtype=np.bool_)
            kept[order[taken]] = False
            left, best, least, other = left[kept], best[kept], least[kept], other[kept]
            # Costs have risen on the workers that took somebody; on all others if loads lead less.
            risen = np.full(len(loads), loads.max() != fullest)
            risen[workers[taken]] = True
            stale = risen[best]
            best[stale], least[stale], other[stale] = self._best(left[stale], pending, loads)

    def _best(self, rows: Ints, pending: Floats, loads: Floats) -> tuple[Ints, Floats, Floats]:
        """Of these requests the worker of least cost, its cost, and the least of the others."""
        costs = self.work[rows] + pending
        after = self.sizes[rows, None] + (loads - loads.max() if self.barrier else loads)
        costs += EXCESS_STEPS * np.maximum(0.0, after)
        costs += _TIE * loads
        costs[~self.fits[rows]] = np.inf
        best = costs.argmin(axis=1)
        every = np.arange(len(rows))
        least = costs[every, best]
        costs[every, best] = np.inf
        return best, least, costs.min(axis=1, initial=np.inf)


def _before(work: Floats, first: Bools) -> Floats:
    """Sum of the work before each, since the last ``first``."""
    total = np.cumsum(work) - work
    starts = np.flatnonzero(first)
    sums: Floats = total - np.repeat(total[starts], np.diff(np.append(starts, len(work))))
    return sums
