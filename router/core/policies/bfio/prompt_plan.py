"""The plan for prompts: which waiting request is computed where, and which are sent now.

Where workers compute prompts, a placement costs the time that it adds at the barrier, as in
``prompts.barrier_time``: on worker g, in KV tokens' worth,

    beta (pending_g + A (s_i - hit_ig)) + D max(0, L_g + s_i - max L)

with beta = t_p / t_l. All waiting requests are planned, on busy workers too, since a request may be
computed sooner behind others where its prefix is cached than at once where it is not. Only what a
worker needs until the next round's requests arrive is sent. The rest waits in the router and is
planned anew at the next step: late binding. The least cost goes first, less A times the time
waited, so that short prompts do not wait for long ones. A request that arrives later than by a part
1 / A of another's cost in time does not overtake it, so none waits for ever. The rule is our own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from router.core.forecast.forecast import Bools, Floats, Ints, WorkProfile
from router.core.policies.policy_protocol import Known
from router.core.policies.prompts import ANEW, EXCESS_STEPS
from router.core.policies.room import Room
from router.core.queue.tier import Tier
from router.core.types import Assignment, Request, WorkerView

# Seconds of a prompt token while no step has told of any; they only weigh the time waited. A dense
# model of 8e9 parameters needs twice as many on an A100 at half of its peak.
_PROMPT_TOKEN_S = 5e-5

# Planned together, the oldest that fit: as many, or as many for each open worker.
_CANDIDATES, _CANDIDATES_EACH = 64, 2


def planned(
    tier: Tier, workers: Sequence[WorkerView], known: Known, profile: WorkProfile
) -> Sequence[Assignment]:
    """Requests that the plan sends now; where requests may not wait, all."""
    room = Room(workers, known)
    open_ = sum([worker.pending_prompt_tokens < known.busy_from for worker in workers])
    waiting = iter(room.fitting(tier))
    while not room.full:
        left = list(islice(waiting, max(_CANDIDATES, _CANDIDATES_EACH * open_)))
        if not left or _send(left, room, profile):
            break
    return room.assignments


def _send(left: Sequence[Request], room: Room, profile: WorkProfile) -> bool:
    """Send what the plan sends now; true if a request waits for a busy worker."""
    refused = True
    while left and refused:
        refused = False
        sent = set()
        for row, worker in _plan(Tier.of(left), room, profile).sent():
            # The plan counts slots, and looks at memory for each request alone.
            if room.fits(worker, left[row]):
                room.place(worker, left[row])
                sent.add(row)
            else:
                refused = True
        # A request that a worker has no memory for, after all, may go to another.
        left = [request for row, request in enumerate(left) if row not in sent]
    return len(room.fitting(left)) > 0


def _plan(waiting: Tier, room: Room, profile: WorkProfile) -> PromptPlan:
    known, beta = room.known, profile.prefill_beta
    sizes = waiting.prompt_tokens * waiting.slots
    if known.hits is None:
        work = np.zeros((len(waiting), len(room.ids)))
    else:
        work = np.array([known.hits(each) for each in waiting], dtype=np.float64)
        work *= (-beta * waiting.slots)[:, None]
    work += (beta * sizes)[:, None]
    waited = known.now_s - np.array([request.arrival_s for request in waiting])
    return PromptPlan(
        work,
        sizes,
        waiting.slots,
        ANEW * waited * beta / _prompt_token_s(known, beta),
        pending=beta * np.array(room.pending, dtype=np.float64),
        loads=np.array(room.load_tokens, dtype=np.float64),
        capacity=np.array(room.capacity),
        fits=room.fit(waiting),
        open_below=beta * known.busy_from,
    )


def _prompt_token_s(known: Known, beta: float) -> float:
    """The learned t_p, or what beta makes of t_l where steps have hardly told of prompts yet."""
    if (cost := known.step_time) is None:
        return _PROMPT_TOKEN_S
    return max(cost.per_prompt_token_s, beta * cost.per_token_s / 2) or _PROMPT_TOKEN_S


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """One decision: R requests, G workers; in KV tokens' worth unless said.

    Attributes:
        work: shape (R, G), beta times the prompt tokens that each worker would compute of each.
        sizes: shape (R,), KV tokens that each request adds.
        slots: shape (R,), that each takes; on a worker's last one it goes all the same.
        waited: shape (R,), A times the time that each has waited, since ``work`` weighs so too.
        pending: shape (G,), beta times the prompt tokens that each worker has yet to compute.
        loads: shape (G,), KV tokens.
        capacity: shape (G,), free slots.
        fits: shape (R, G), whether a worker could take the request, with a slot and memory.
        open_below: a worker with less pending is sent more.
    """

    work: Floats
    sizes: Ints
    slots: Ints
    waited: Floats
    pending: Floats
    loads: Floats
    capacity: Ints
    fits: Bools
    open_below: float

    def sent(self) -> Sequence[tuple[int, int]]:
        """Requests to send now and their workers, in the order of the plan.

        The request of least cost goes first, then the next, by costs with those before it.
        """
        from router.core.policies.bfio.plan_kernel import plan  # imports numba

        sent = np.empty((2, len(self.sizes)), np.int64)
        count = plan(
            self.work,
            self.sizes.astype(np.float64),
            self.slots,
            self.waited,
            self.pending.copy(),
            self.loads.copy(),
            self.capacity.copy(),
            np.ascontiguousarray(self.fits),
            float(self.open_below),
            float(EXCESS_STEPS),
            ANEW,
            sent,
        )
        return list(zip(*sent[:, :count].tolist(), strict=True))
