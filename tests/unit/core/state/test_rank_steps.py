"""Barrier steps put together from the snapshots of several ranks."""

import math

import pytest
from msgspec.structs import replace

from router.core.types import RunningRequest, Snapshot
from tests.support.core import snapshot
from tests.support.moe_lockstep.runs import overtakings
from tests.support.rank_steps import GroupFigures, RankStep, group_figures, rank_steps

WHOLE = (0.0, math.inf)


def part(time_s: float, load: int, running: int, entered: int = 0) -> RankStep:
    return RankStep(time_s, 0.5, load, running, entered, tokens=running)


def told(sequence: int, step: int, *rows: RunningRequest, tokens: int = 0) -> Snapshot:
    return replace(snapshot("delta", sequence, *rows, step=step), scheduled_decode_tokens=tokens)


def test_a_rank_s_steps() -> None:
    steps = rank_steps(
        [
            told(0, 0),
            told(1, 4, RunningRequest("a", 10, 1), RunningRequest("b", 20, 1), tokens=2),
            told(2, 5, tokens=2),
            told(3, 5),
        ]
    )
    assert {
        number: (step.load_tokens, step.running, step.entered) for number, step in steps.items()
    } == {
        4: (32, 2, 2),
        5: (34, 2, 0),
    }


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([told(0, 0), told(2, 1, tokens=1)], "snapshot 1 is missing"),
        ([told(0, 0), told(1, 1, tokens=1), told(2, 1, tokens=1)], "step 1 is told of twice"),
    ],
)
def test_streams_that_are_not_whole(messages: list[Snapshot], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        rank_steps(messages)


def test_a_rank_with_nothing_to_compute_counts_as_empty() -> None:
    ranks = [{1: part(1, 100, 2, entered=2), 2: part(2, 102, 2)}, {1: part(1, 40, 1, entered=1)}]
    assert group_figures(ranks, 2, *WHOLE) == GroupFigures(
        steps=2,
        imbalance_tokens=(60 + 102) / 2,
        mean_load_tokens=(70 + 51) / 2,
        max_load_tokens=101,
        slot_bubble_steps=(1 + 2) / 3,
        step_mean_s=0.5,
    )


def test_only_steps_of_the_window_count() -> None:
    ranks = [{1: part(1, 10, 1), 2: part(2, 30, 1)}, {2: part(2.5, 10, 1), 3: part(9, 9, 1)}]
    assert group_figures(ranks, 1, 1.5, 3).imbalance_tokens == 20
    with pytest.raises(ValueError, match="no step"):
        group_figures(ranks, 1, 20, 30)


def test_overtakings() -> None:
    kept = [{1: part(1, 1, 1), 2: part(2, 1, 1)}, {1: part(1.5, 1, 1), 2: part(1.9, 1, 1)}]
    assert overtakings(kept) == []
    assert overtakings([{1: part(3, 1, 1)}, {2: part(2, 1, 1)}]) == [2]
