"""Random programs for the solver."""

from collections.abc import Iterator

import numpy as np

from router.core.forecast.forecast import Ints
from router.core.policies.bfio.solver import Instance, Memory


def admits(memory: Memory, worker: int, needs: Ints) -> bool:
    """Whether a worker can take candidates of these needs together."""
    alone = len(needs) == 1 and memory.idle[worker]
    return bool(needs.sum() <= memory.room[worker] or len(needs) == 0 or alone)


def programs(
    count: int,
    workers: tuple[int, int],
    candidates: tuple[int, int],
    steps: int,
    capacity: int = 3,
    tie_weight: float = 0.0,
    seed: int = 0,
) -> Iterator[Instance]:
    """Busy workers whose loads wander, and prompts of a long tail, as simulations come to."""
    rng = np.random.default_rng(seed)
    ahead = np.arange(steps, dtype=np.float64)
    for _ in range(count):
        number = int(rng.integers(workers[0], workers[1] + 1))
        sizes = np.ceil(rng.lognormal(5.5, 1.0, int(rng.integers(*candidates, endpoint=True))))
        loads = 30_000 + rng.normal(0, 400, (number, steps)).cumsum(axis=1).round()
        yield Instance(
            loads=loads,
            candidates=sizes[:, None] + ahead,
            capacity=rng.integers(0, capacity, number, endpoint=True),
            weights=0.8**ahead,
            tie_weight=tie_weight,
        )
