"""When a newcomer's first token may be expected, by the learned costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from router.core.state.short_misses import through
from router.core.types import Dispatch, Request

if TYPE_CHECKING:
    from router.core.state.group import Group


class Expected(NamedTuple):
    """Seconds until the first token: as things stand, and for its prompt on an idle worker."""

    seconds: float
    alone_s: float


def expected_s(
    request: Request,
    group: Group,
    dispatch: Dispatch,
    ahead_slots: int,
    ahead_tokens: npt.NDArray[np.int64],
) -> Expected | None:
    """A newcomer's first token at the soonest; None: the costs are not learned yet.

    It comes at the later of two times. The workers compute the prompts that are pending, those
    ahead in the pool and its own; of a longer one ahead only as much as its own counts, since a
    policy may let the shorter one pass. Or half of those that lack slots need them first, since a
    policy chooses among them by what else it knows, and requests end as they did of late.
    ``ahead_slots``: engine requests ahead of it in the pool; ``ahead_tokens``: of each prompt.
    """
    if group.serves is not None:
        times = list(through(request, group, int(ahead_tokens.sum())))
        return Expected(min(times)[0], min(alone_s for *_, alone_s in times)) if times else None
    cost, workers = group.step_time, group.live_workers()
    able = [i for i, worker in enumerate(workers) if worker.spec.id not in request.lacks]
    if cost is None or not able:
        return None
    every = group.views(dispatch)
    views = [every[i] for i in able]
    hits = None if group.hits is None else group.hits(request)
    own = np.array([request.prompt_tokens - (hits[i] if hits else 0) for i in able])
    totals, budget = group.hit_totals, group.prompt_budget
    uncached = 1 - totals.found_tokens / max(1, totals.prompt_tokens)
    before = np.minimum(uncached * ahead_tokens, own.min()).sum() / len(able)
    steps_s = np.array([cost.seconds(view.load_tokens, view.requests) for view in views])
    if group.barrier is not False:
        steps_s[:] = steps_s.max()
    any_s, each_s = cost.prompts_s(0)
    alone_s = cost.seconds(0, 0) + any_s + each_s * float(own.min())
    chunk, window = group.shown.chunk, budget.every if budget else 1

    def least_s(tokens: npt.NDArray[np.float64]) -> float:
        steps = np.maximum(1, np.ceil(tokens / chunk)) * window
        return float((steps * (steps_s + any_s) + each_s * tokens).min())

    pending = np.array([view.pending_prompt_tokens for view in views])
    prompts_s = least_s(pending + before + own)
    lacking = ahead_slots + request.slots - sum(view.capacity for view in views)
    ends_per_s = sum(
        view.requests * (workers[i].service.known_per_s or 0.0)
        for i, view in zip(able, views, strict=True)
    )
    if lacking > 0 and ends_per_s:
        prompts_s = max(prompts_s, lacking / 2 / ends_per_s + least_s(own))
    return Expected(prompts_s, alone_s)
