"""The integer program and its solver on instances small enough to solve by hand."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest

from router.core.policies.bfio.solver import DEFAULT_MOVES, Instance, solve
from tests.support.instances import programs


def program(
    loads: Sequence[Sequence[float]],
    sizes: Sequence[float],
    capacity: Sequence[int],
    weights: Sequence[float] = (),
    tie_weight: float = 0.0,
    growth: float = 0.0,
) -> Instance:
    steps = len(loads[0]) if loads else 1
    return Instance(
        loads=np.array(loads, dtype=np.float64).reshape(-1, steps),
        candidates=np.array(sizes, dtype=np.float64)[:, None] + growth * np.arange(steps),
        capacity=np.array(capacity, dtype=np.int64),
        weights=np.array(weights or [1.0] * steps),
        tie_weight=tie_weight,
    )


def test_the_objective_is_the_papers_with_the_quadratic_term() -> None:
    instance = program(
        [[10, 20], [30, 5]], [7, 4, 100], [1, 1], weights=[1, 0.5], tie_weight=0.1, growth=1
    )
    places = np.array([0, 1, -1])
    assert instance.loads_after(places).tolist() == [[17, 28], [34, 10]]
    idle = (2 * 34 - 51) + 0.5 * (2 * 28 - 38)
    spread = (8.5**2 + 8.5**2) + 0.5 * (9**2 + 9**2)
    assert instance.objective(places) == pytest.approx(idle + 0.1 * spread)
    assert instance.most_admitted == 2
    assert solve(instance).places.tolist() == [0, 1, -1]


@pytest.mark.parametrize(
    ("instance", "expected"),
    [
        pytest.param(program([[100], [60]], [50, 10, 40], [1, 1]), [1, 0, -1], id="level"),
        pytest.param(program([[100], [60]], [90, 42, 39], [0, 1]), [-1, -1, 1], id="below it"),
        pytest.param(program([[100], [60]], [90, 41, 50], [0, 1]), [-1, 1, -1], id="the least"),
        pytest.param(program([[5], [7]], [3, 3, 3], [0, 2]), [1, 1, -1], id="the first alike"),
        pytest.param(program([[5], [7]], [3, 9], [-4, 0]), [-1, -1], id="no room"),
        pytest.param(program([[5], [7]], [], [1, 1]), [], id="nobody waits"),
        pytest.param(program([[0], [0]], [8, 7, 6, 5, 4], [3, 3]), [0, 0, 1, 1, 1], id="all in"),
        pytest.param(program([[9, 0], [0, 9]], [9, 8], [1, 1], growth=-8), [0, 1], id="two steps"),
        pytest.param(program([[5]], [3, 1], [1]), [0, -1], id="one worker"),
        pytest.param(program([], [3, 1], []), [-1, -1], id="no worker"),
        pytest.param(program([[100], [60]], [41, 39], [0, 1], [0.0]), [1, -1], id="no weight"),
    ],
)
def test_choices(instance: Instance, expected: list[int]) -> None:
    solution = solve(instance)
    places = np.array(expected, dtype=np.int64)
    best = instance.objective(places) if len(instance.loads) else 0.0
    assert solution.objective == pytest.approx(best)
    assert (solution.places >= 0).sum() == (places >= 0).sum()


def test_steps_without_weight_do_not_count() -> None:
    near, far = program([[0, 9], [9, 0]], [9, 8], [1, 0], [1, 0]), [[0.0, 9.0], [9.0, 0.0]]
    assert solve(near).places.tolist() == [0, -1]
    assert solve(program(far, [9, 8], [1, 0], [0, 1])).places.tolist() == [-1, 0]


def test_the_budget_is_counted_in_costs_over_one_step() -> None:
    short, long = (next(programs(1, (8, 8), (64, 64), steps)) for steps in (1, 25))
    assert solve(short, 0).moves < solve(long, 0).moves < 8 * solve(short, 0).moves
    assert solve(short, 20_000).moves == pytest.approx(20_000, rel=0.1)


def test_two_items_of_a_worker_give_way_to_a_better_two() -> None:
    """No single one helps: 60 and 30 are the only two that fill the gap."""
    instance = program([[100], [10]], [60, 30, 55, 40, 37, 200], [0, 2])
    solution = solve(instance)
    assert (sorted(solution.places.tolist()), solution.objective) == ([-1, -1, -1, -1, 1, 1], 0.0)
    assert solution.places.tolist()[:2] == [1, 1]


def test_a_common_shift_of_several_workers_is_found() -> None:
    """Each is at the peak at a step of its own, so that none can be lowered alone."""
    steps = 3
    loads = [[100.0 * (g == h) for h in range(steps)] for g in range(steps)]
    sizes = [50.0, 51.0, 52.0, 10.0, 11.0, 12.0]
    instance = program([*loads, [112.0] * steps], sizes, [1, 1, 1, 0])
    assert sorted(solve(instance).places.tolist()[3:]) == [0, 1, 2]


def test_importing_policies_does_not_import_numba() -> None:
    check = "import sys, router.cli, router.core.policies; sys.exit('numba' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)


def test_the_default_budget_finds_nearly_what_a_large_one_finds() -> None:
    usual = large = 0.0
    for steps, tie_weight in ((1, 0.1), (21, 1e-4)):
        for instance in programs(5, (16, 16), (128, 128), steps, tie_weight=tie_weight, seed=3):
            usual += solve(instance, DEFAULT_MOVES).objective
            large += solve(instance, 20 * DEFAULT_MOVES).objective
    assert usual <= 1.04 * large


def test_a_burst_into_empty_workers_is_spread_evenly_whatever_the_budget() -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 1001, 1024).astype(np.float64)
    burst = Instance(np.zeros((16, 1)), sizes[:, None], np.full(16, 32), np.ones(1), 0.1)
    for moves, most in ((0, 1e-3), (30_000, 1e-5)):
        loads = burst.loads_after(solve(burst, moves).places)[:, 0]
        assert loads.max() - loads.mean() <= most * loads.mean()
        assert loads.sum() == pytest.approx(16 * 32 * sizes.mean(), rel=0.05)
