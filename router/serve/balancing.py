"""Policy and queue limits from the settings, changeable at run time."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from router.config.live import Part, taken_by
from router.config.marks import TakenBy
from router.config.settings import ServeSettings
from router.core.forecast.look_ahead import SIGNALS, LookAhead
from router.core.forecast.step_cost import WorkProfile
from router.core.policies.bfio.calibration import moves_within, must_compile
from router.core.policies.bfio.solver import DEFAULT_MOVES
from router.core.policies.protocol import Policy
from router.core.policies.table import POLICIES, PolicySettings
from router.core.types import DEFAULT_SLOTS
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.lane import DispatchSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Deciding:
    """Factories of a group's policy, fallback policy and look-ahead."""

    policy: Callable[[], Policy]
    fallback: Callable[[], Policy]
    look_ahead: Callable[[], LookAhead | None]


def deciding(settings: ServeSettings) -> Deciding:
    """Return the factories for the configured policy."""
    chosen = PolicySettings(seed=settings.seed, moves=_moves(settings))
    row = POLICIES[settings.policy]
    return Deciding(
        lambda: row.make(chosen),
        lambda: POLICIES["least_tokens"].make(chosen),
        lambda: _look_ahead(settings) if row.looks_ahead else None,
    )


def bounds(settings: ServeSettings) -> DispatchSettings:
    """Return the limits of the queue and of waiting."""
    return DispatchSettings(
        dispatch=settings.dispatch,
        pool_limit=settings.pool_size,
        patience_s=settings.starvation_s,
        queue_timeout_s=settings.queue_timeout_s,
        snapshot_stale_s=settings.snapshot_stale_s,
        overcommit=settings.overcommit,
        retry_share=settings.retry_budget,
        retry_min_per_s=settings.retry_min_per_s,
    )


def balancing(settings: ServeSettings, dispatcher: Dispatcher) -> Part:
    """Reloadable policy and limits; a change of the policy's settings discards what it learned."""
    deciding_names = taken_by(TakenBy.POLICY)
    in_force = settings

    def take(settings: ServeSettings) -> None:
        nonlocal in_force
        if any(getattr(settings, name) != getattr(in_force, name) for name in deciding_names):
            chosen = deciding(settings)
            dispatcher.decide_by(chosen.policy, chosen.look_ahead)
        dispatcher.lanes.configure(bounds(settings))
        in_force = settings

    return Part(deciding_names | taken_by(TakenBy.POOL), take)


def _moves(settings: ServeSettings) -> int:
    """Return the moves that the solver's time allows on this machine, for the largest group."""
    if settings.policy != "bfio" or not settings.workers:
        return DEFAULT_MOVES
    decoding = [worker for worker in settings.workers if worker.role != "prefill"]
    workers = max(Counter(worker.group for worker in decoding).values())
    slots = decoding[0].slots or DEFAULT_SLOTS
    return _measured(settings.solver_ms, workers, slots)


@lru_cache
def _measured(solver_ms: float, workers: int, slots: int) -> int:
    compiling = "; compiling it takes half a minute, once" if must_compile() else ""
    log.info("bfio: looking how fast its search is here%s", compiling)
    moves = moves_within(solver_ms / 1000, workers, slots, time.perf_counter)
    log.info("bfio: %d moves of its search take %g ms here", moves, solver_ms)
    return moves


def _look_ahead(settings: ServeSettings) -> LookAhead:
    profile = WorkProfile(
        growth=settings.drift,
        window=settings.window,
        window_share=settings.window_share,
        request_tokens=settings.request_tokens,
        prefill_beta=settings.prefill_beta,
        prefill_chunk=settings.prefill_chunk,
    )
    return LookAhead(
        SIGNALS[settings.lookahead](profile),
        profile,
        settings.horizon,
        settings.discount,
        settings.tie_weight,
        settings.lead_tokens,
    )
