"""What decides, and within which bounds, from the settings; these may change while it runs."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from router.dispatch import Dispatcher
from router.lane import DispatchSettings
from router.lookahead import SIGNALS, LookAhead
from router.policies import POLICIES, PolicySettings
from router.policies.calibration import moves_within, must_compile
from router.policies.solver import DEFAULT_MOVES
from router.policy import Policy
from router.reload import Part
from router.settings.serve import ServeSettings
from router.types import DEFAULT_SLOTS
from router.workload import WorkProfile

log = logging.getLogger(__name__)

_DECIDING = frozenset(
    {"policy", "lookahead", "horizon", "discount", "tie_weight", "lead_tokens", "solver_ms", "seed"}
    | {"drift", "window", "window_share", "request_tokens", "prefill_beta"}
)
_BOUNDS = frozenset(
    {"dispatch", "pool_size", "starvation_s", "queue_timeout_s", "snapshot_stale_s", "overcommit"}
    | {"retry_budget", "retry_min_per_s"}
)


@dataclass(frozen=True, slots=True)
class Deciding:
    """Makes for a group what decides for it: a policy, what stands in for it, its look-ahead."""

    policy: Callable[[], Policy]
    fallback: Callable[[], Policy]
    look_ahead: Callable[[], LookAhead | None]


def deciding(settings: ServeSettings) -> Deciding:
    """Who decides."""
    chosen = PolicySettings(seed=settings.seed, moves=_moves(settings))
    row = POLICIES[settings.policy]
    return Deciding(
        lambda: row.make(chosen),
        lambda: POLICIES["least_tokens"].make(chosen),
        lambda: _look_ahead(settings) if row.looks_ahead else None,
    )


def bounds(settings: ServeSettings) -> DispatchSettings:
    """How many wait, and for how long."""
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
    """Both, taken anew; what a policy has learned is lost if something about it is changed.

    Args:
        settings: those in force.
        dispatcher: decides by them.
    """
    in_force = settings

    def take(settings: ServeSettings) -> None:
        nonlocal in_force
        if any(getattr(settings, name) != getattr(in_force, name) for name in _DECIDING):
            chosen = deciding(settings)
            dispatcher.decide_by(chosen.policy, chosen.look_ahead)
        dispatcher.lanes.configure(bounds(settings))
        in_force = settings

    return Part(_DECIDING | _BOUNDS, take)


def _moves(settings: ServeSettings) -> int:
    """What the solver's time buys on this machine, for the largest group."""
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
