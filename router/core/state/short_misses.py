"""Prompts in a group with prefill workers: what is fetched, and what is computed sooner without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import TYPE_CHECKING

from router.core.state.prefill_worker import PrefillWorker
from router.core.types import Dispatch, Hits, Request

if TYPE_CHECKING:
    from router.core.state.group import Group


def fetched_or_cached(cached: Hits | None, workers: int, request: Request) -> Sequence[int]:
    """Tokens that each worker need not compute: all of a computed prompt, else those cached."""
    if request.computed or cached is None:
        return [request.prompt_tokens * request.computed] * workers
    return cached(request)


def sooner_at(request: Request, group: Group) -> str | None:
    """Id of the worker that should compute a prompt itself; None: a prefill worker should.

    There a prompt lengthens a step of all that wait for each other. It is worth that if these and
    the request together lose less time than the request alone would at the prefill workers. While
    no step has told what prompts cost, a token costs what it does at those.
    """
    stage, hits, cost = group.prefills, group.hits, group.step_time
    times = [] if stage is None else list(through(request, stage))
    if not times or hits is None:
        return None
    (least_s, token_s, _), chosen = min(times), None
    views = group.views(Dispatch.POOL)
    every = sum(view.requests for view in views)
    for view, cached in zip(views, hits(request), strict=True):
        any_s = each_s = 0.0
        if cost is not None and cost.prompts_known:
            any_s, each_s = cost.prompts_s(cached)
        each_s = each_s or token_s
        longer_s = any_s + each_s * (request.prompt_tokens - cached)
        delayed = 1 + (view.requests if group.barrier is False else every)
        lost_s = each_s * view.pending_prompt_tokens + delayed * longer_s
        free = view.capacity >= request.slots and view.takes(request)
        if lost_s < least_s and free and view.id not in request.lacks:
            least_s, chosen = lost_s, view.id
    return chosen


def through(
    request: Request, stage: Group, ahead_tokens: int = 0
) -> Iterator[tuple[float, float, float]]:
    """Seconds until each prefill worker has computed a prompt, those of a token, and of it alone.

    ``ahead_tokens``: of prompts that all prefill workers compute before.
    """
    ahead = ahead_tokens / max(1, len(stage.live_workers()))
    cached = repeat(0) if stage.hits is None else stage.hits(request)
    for worker, tokens in zip(stage.live_workers(), cached, strict=False):
        if isinstance(worker, PrefillWorker) and worker.takes and worker.token_s:
            own = request.prompt_tokens - tokens
            before, token_s = worker.load_tokens + ahead, worker.token_s
            yield token_s * (before + own), token_s, token_s * own
