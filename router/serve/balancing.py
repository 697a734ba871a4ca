"""Policy and queue limits from the settings, changeable at run time."""

import logging
import time
from collections import Counter
from functools import lru_cache

from router.config.live import Part
from router.config.serve_settings import ServeSettings
from router.core.forecast.forecast import WorkProfile
from router.core.forecast.look_ahead import SIGNALS, LookAhead
from router.core.policies.bfio.calibration import moves_within, must_compile
from router.core.policies.bfio.solver import DEFAULT_MOVES
from router.core.policies.policy_table import POLICIES, PolicySettings
from router.core.types import DEFAULT_SLOTS
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.group_queue import DispatchSettings
from router.dispatch.interface import Deciding

log = logging.getLogger(__name__)


# A change of these discards what policies and look-ahead have learned.
_DECIDING = ("policy", "seed", "solver_ms", "lookahead", "horizon", "discount", "tie_weight")


def deciding(settings: ServeSettings) -> Deciding:
    """By the configured policy."""
    moves, decoding = DEFAULT_MOVES, [spec for spec in settings.workers if spec.role != "prefill"]
    if settings.policy == "bfio" and decoding:
        # What the solver's time allows on this machine, for the largest group.
        workers = max(Counter(spec.group for spec in decoding).values())
        moves = _measured(settings.solver_ms, workers, decoding[0].slots or DEFAULT_SLOTS)
    chosen = PolicySettings(seed=settings.seed, moves=moves)
    row = POLICIES[settings.policy]
    return Deciding(
        lambda: row.make(chosen),
        lambda: POLICIES["least_tokens"].make(chosen),
        lambda: _look_ahead(settings) if row.looks_ahead else None,
    )


def _look_ahead(settings: ServeSettings) -> LookAhead:
    """Its work profile is learned from here on."""
    profile = WorkProfile()
    signal = SIGNALS[settings.lookahead](profile)
    return LookAhead(signal, profile, settings.horizon, settings.discount, settings.tie_weight)


def balancing(settings: ServeSettings, dispatcher: Dispatcher) -> Part:
    """Reloadable policy and limits."""
    in_force = settings

    def take(settings: ServeSettings) -> None:
        nonlocal in_force
        if any(getattr(settings, name) != getattr(in_force, name) for name in _DECIDING):
            dispatcher.decide_by(deciding(settings))
        in_force = settings
        dispatcher.fix_step_time(settings.fixed_step_time)
        dispatcher.bound_prompts_by(settings.prompt_rule)
        dispatcher.configure(settings.of(DispatchSettings))

    return Part(take)


@lru_cache
def _measured(solver_ms: float, workers: int, slots: int) -> int:
    compiling = "; compiling it takes half a minute, once" if must_compile() else ""
    log.info("bfio: looking how fast its search is here%s", compiling)
    moves = moves_within(solver_ms / 1000, workers, slots, time.perf_counter)
    log.info("bfio: %d moves of its search take %g ms here", moves, solver_ms)
    return moves
