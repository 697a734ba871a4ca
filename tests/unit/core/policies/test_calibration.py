"""The budget of the search from a time, with a clock that counts its moves."""

from __future__ import annotations

import pytest

from router.core.policies.bfio import calibration
from router.core.policies.bfio.calibration import moves_within, must_compile, typical_instance
from router.core.policies.bfio.solver import DEFAULT_MOVES, Instance, Solution, solve


class Machine:
    """Needs a millisecond for the filling and so many for a thousand moves."""

    def __init__(self, ms_per_1000_moves: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self._speed = ms_per_1000_moves
        monkeypatch.setattr(calibration, "solve", self.solve)

    def solve(self, instance: Instance, moves: int) -> Solution:
        made = max(moves, 300)
        self.now_s += 1e-3 + (made - 300) * self._speed * 1e-6
        return Solution(solve(instance, 0).places, 0.0, made)

    def clock(self) -> float:
        return self.now_s


@pytest.mark.parametrize(("speed", "expected"), [(0.1, 10_300), (0.5, 2_300)])
def test_a_slower_machine_is_given_fewer_moves(
    speed: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(speed, monkeypatch)
    assert moves_within(2e-3, 8, 32, machine.clock) == pytest.approx(expected, rel=1e-3)


def test_no_time_leaves_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    assert moves_within(1e-6, 8, 32, Machine(0.5, monkeypatch).clock) == 200


def test_a_clock_that_shows_no_difference_gives_the_default() -> None:
    assert moves_within(1e-3, 1, 32, lambda: 0.0) == DEFAULT_MOVES


def test_warming_up_solves_something(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(0.5, monkeypatch)
    calibration.warm_up()
    assert machine.now_s > 0


def test_the_search_is_compiled_once() -> None:
    calibration.warm_up()
    assert not must_compile()


def test_the_instance_is_one_with_a_choice() -> None:
    instance = typical_instance(8, 72)
    assert 0 < instance.most_admitted < len(instance.candidates)
