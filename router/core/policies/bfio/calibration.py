"""Search moves per second on this machine, measured once when a router starts.

The search itself reads no clock, so its results do not depend on the machine's load.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from router.core.policies.bfio.prompt_plan import PromptPlan
from router.core.policies.bfio.solver import DEFAULT_MOVES, Instance, solve

_REPEATS = 5
_STEPS = 9
_LEAST_MOVES = 200


def typical_instance(workers: int, slots: int) -> Instance:
    """A decision of a busy group: one or two free slots per worker, and four candidates."""
    rng = np.random.default_rng(0)
    ahead = np.arange(_STEPS, dtype=np.float64)
    sizes = np.ceil(rng.lognormal(5.5, 1.0, 4 * workers))
    loads = rng.normal(1000.0 * slots, 1000.0, workers)
    return Instance(
        loads=loads[:, None] + slots * ahead,
        candidates=sizes[:, None] + ahead,
        capacity=np.concatenate(([1], rng.integers(0, 4, workers - 1))),
        weights=0.7**ahead,
        tie_weight=1e-3,
    )


def moves_within(seconds: float, workers: int, slots: int, clock: Callable[[], float]) -> int:
    """Budget that keeps a typical decision within a time; compilation is not timed."""
    instance = typical_instance(max(2, workers), slots)
    warm_up()
    filling_s, fewest = _timed(instance, 0, clock)
    searching_s, most = _timed(instance, DEFAULT_MOVES, clock)
    if searching_s <= filling_s or most <= fewest:
        return DEFAULT_MOVES
    rate = (most - fewest) / (searching_s - filling_s)
    return max(_LEAST_MOVES, fewest + int(rate * (seconds - filling_s)))


def must_compile() -> bool:
    """True if the first decisions must compile what they run, which takes half a minute."""
    from router.core.policies.bfio.compiled import on_disk
    from router.core.policies.bfio.plan_kernel import plan
    from router.core.policies.bfio.search import search

    return not (on_disk(search) and on_disk(plan))


def warm_up() -> None:
    """Compile the search, and the plan for prompts, into the cache on disk."""
    solve(typical_instance(2, 8), 0)
    one, few = np.ones((1, 1)), np.ones(1, np.int64)
    PromptPlan(one, few, few, one[0], one[0], one[0], few, one > 0, open_below=1.0).sent()


def _timed(instance: Instance, moves: int, clock: Callable[[], float]) -> tuple[float, int]:
    shortest, made = np.inf, 0
    for _ in range(_REPEATS):
        start_s = clock()
        made = solve(instance, moves).moves
        shortest = min(shortest, clock() - start_s)
    return float(shortest), made


if __name__ == "__main__":
    warm_up()
