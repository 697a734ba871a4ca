"""What a call measures: rounds of two engines in turns while there is time, and idle power."""

from __future__ import annotations

import contextlib
import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.gpu import measure
from tests.gpu.measure import ROUNDS, SMALL, figures, plug_in_cost
from tests.gpu.parts import Budget, Parts, Values
from tests.gpu.serving import Engine, Machine
from tests.gpu.steps import NeverSeenError

SIZES = replace(SMALL, rounds=4, hook_steps=10)
PROMPTS_S = 4.0
STEP_S = {"plug-in": 2.0, "plain": 1.0}
# Two bursts of each engine, the shorter one of a single step.
ROUND_S = 4 * PROMPTS_S + (2 + SIZES.hook_steps) * sum(STEP_S.values())
CPU = Machine(Path("/python"), "tiny", True, (), Path("/parts"), "5f1e")


class Timed:
    """An engine that takes its time by a clock of the test's own."""

    def __init__(self, name: str, clock: Clock) -> None:
        self._name = name
        self._clock = clock

    def decode_together(self, _batch: int, _context: int, tokens: int) -> None:
        self._clock.turns.append(self._name)
        self._clock.now_s += PROMPTS_S + STEP_S[self._name] * tokens


class Clock:
    """The time, and who had each burst."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.turns: list[str] = []

    def perf_counter(self) -> float:
        return self.now_s


Call = Callable[[float], tuple[Values, list[str]]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """Measure for so many seconds: the rounds that are kept, and who was first in each new one."""
    clock = Clock()
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=clock.perf_counter))

    @contextlib.contextmanager
    def engine(_where: Machine, name: str, *_flags: str, **_more: Any) -> Iterator[Timed]:
        yield Timed(name, clock)

    monkeypatch.setattr(measure, "engine", engine)

    def measured(limit_s: float) -> tuple[Values, list[str]]:
        parts = Parts(tmp_path / "step_time.json", {}, figures)
        parts.begin({}, "5f1e")
        clock.turns.clear()
        budget = Budget(limit_s + 40, {ROUNDS: 1.0}, clock.perf_counter)
        plugged = cast(Engine, Timed("plug-in", clock))
        plug_in_cost(CPU, parts, plugged, SIZES, (), budget)
        return parts.of(ROUNDS), clock.turns[4::4]  # the warm-up's left out

    return measured


def test_rounds_begin_while_there_is_time_and_a_later_call_goes_on_in_turn(call: Call) -> None:
    rounds, first = call(1.5 * ROUND_S)  # the warm-up takes as long as a round
    assert (list(rounds), first) == (["1"], ["plug-in"])
    rounds, first = call(1.5 * ROUND_S)
    assert (list(rounds), first) == (["1", "2"], ["plain"])
    rounds, first = call(9 * ROUND_S)
    assert (list(rounds), first) == (["1", "2", "3", "4"], ["plug-in", "plain"])


def test_a_round_tells_the_time_of_a_step_without_that_of_prompts(call: Call) -> None:
    rounds, _ = call(1.5 * ROUND_S)
    assert rounds["1"] == {
        "on_step_s": pytest.approx(STEP_S["plug-in"]),
        "off_step_s": pytest.approx(STEP_S["plain"]),
    }


@pytest.mark.parametrize(("cpu", "found_w"), [(False, [None, 71.5, 71.5]), (True, [None] * 3)])
def test_the_idle_power_of_a_gpu_that_was_unknown_is_measured_again(
    cpu: bool, found_w: list[float | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told_w = iter([None, 71.5, 80.0])

    @contextlib.contextmanager
    def engine(_where: Machine, parts: Parts, _flags: Any) -> Iterator[tuple[None, None]]:
        parts.begin({}, "5f1e")
        yield None, None

    monkeypatch.setattr(measure, "plugged_engine", engine)
    monkeypatch.setattr(measure, "idle_power", lambda *_: next(told_w))
    given = Namespace(out=tmp_path, limit_s=560.0, parts=(measure.IDLE,))
    kept_w = []
    for _ in found_w:
        assert measure.measure(replace(CPU, cpu=cpu), given) == []
        kept = json.loads((tmp_path / measure.FILE).read_text())["measured"]["parts"]
        kept_w.append(kept[measure.IDLE]["power_w"])
    assert kept_w == found_w


@pytest.mark.parametrize("absent", [[], ["uvicorn"]])
def test_what_a_router_cannot_tell_leaves_the_other_parts_alone(
    absent: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def hits(*_: Any) -> Iterator[tuple[str, Values]]:
        yield "first", {"found": 1}
        raise NeverSeenError("no step with the budget")

    @contextlib.contextmanager
    def engine(_where: Machine, parts: Parts, _flags: Any) -> Iterator[tuple[None, None]]:
        parts.begin({}, "5f1e")
        yield None, None

    monkeypatch.setattr(measure, "plugged_engine", engine)
    monkeypatch.setattr(measure, "idle_power", lambda *_: 71.5)
    monkeypatch.setattr(measure, "missing", lambda _: absent)
    monkeypatch.setitem(measure.ROUTED, measure.BUDGETS, hits)
    given = Namespace(out=tmp_path, limit_s=560.0, parts=(measure.BUDGETS, measure.IDLE))
    left = measure.measure(CPU, given)
    assert left == [f"budget: {name}" for name in measure.names(measure.BUDGETS, SMALL)]
    kept = json.loads((tmp_path / measure.FILE).read_text())["measured"]["parts"]
    assert kept[measure.IDLE] == {"power_w": 71.5}
    assert kept.get(measure.BUDGETS) == (None if absent else {"first": {"found": 1}})
    said = "no router without uvicorn" if absent else "no step with the budget"
    assert f"budget: {said}" in capsys.readouterr().err
