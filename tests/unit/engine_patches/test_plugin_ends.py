"""From the workers' probabilities to the rows of a delta."""

from pathlib import Path

import numpy as np
import pytest

from engine_patches.plugin.end_table import (
    STEP_LEAST,
    WINDOW_TOKENS,
    EndReader,
    EndWriter,
    table_path,
)
from engine_patches.plugin.state import EngineState, Step
from tests.support.plugin_engine import Request


@pytest.fixture
def ends(tmp_path: Path) -> tuple[EndWriter, EndReader]:
    path = tmp_path / "ends"
    writer = EndWriter(path, 4)
    reader = EndReader(path)
    assert not path.exists()
    return writer, reader


def take(writer: EndWriter, row: int, number: int, now: float, *, first: bool = False) -> None:
    writer.take(np.array([row]), np.array([number]), np.array([now]), np.array([first]))


def test_what_a_worker_writes_is_read_by_request(ends: tuple[EndWriter, EndReader]) -> None:
    writer, reader = ends
    a, b = reader.number("a"), reader.number("b")
    rows = np.array([writer.enter(a), writer.enter(b)])
    assert reader.changed() == {}
    writer.take(rows, np.array([a, b]), np.array([0.25, 0.0]), np.array([False, False]))
    assert reader.changed() == {"a": 0.25, "b": 0.0}
    assert reader.changed() == {}


def test_a_session_has_one_number_until_it_ends(ends: tuple[EndWriter, EndReader]) -> None:
    _, reader = ends
    numbers = [reader.number(id_) for id_ in ("a", "b", "a")]
    reader.forget(["a"])
    assert [*numbers, reader.number("a")] == [1, 2, 1, 3]


def test_a_mean_at_first_then_a_moving_one(ends: tuple[EndWriter, EndReader]) -> None:
    writer, reader = ends
    row = writer.enter(reader.number("a"))
    chances = [0.1 * number for number in range(WINDOW_TOKENS)]
    for part_of_a_prompt in (0.9, 0.8):
        take(writer, row, 1, part_of_a_prompt, first=True)
    take(writer, row, 1, chances[0], first=True)
    assert reader.changed() == {}, "it may be a part of the prompt too"
    for chance in chances[1:]:
        take(writer, row, 1, chance)
    assert writer.probabilities[row] == pytest.approx(np.mean(chances))
    take(writer, row, 1, 0.0)
    assert writer.probabilities[row] == pytest.approx(np.mean(chances) * (1 - 1 / WINDOW_TOKENS))


def test_small_changes_are_not_told(ends: tuple[EndWriter, EndReader]) -> None:
    writer, reader = ends
    row, told = writer.enter(reader.number("a")), []
    for now in (0.02, 0.029, 0.031, 0.02, 0.0, STEP_LEAST / 2):
        writer.probabilities[row] = now
        told.append(reader.changed().get("a"))
    assert told == [0.02, None, 0.031, None, 0.0, None]


def test_a_row_is_given_to_another_request(ends: tuple[EndWriter, EndReader]) -> None:
    writer, reader = ends
    a, b = reader.number("a"), reader.number("b")
    row = writer.enter(a)
    take(writer, row, a, 0.5)
    assert reader.changed() == {"a": 0.5}
    writer.leave(row)
    assert writer.enter(b) == row
    take(writer, row, a, 0.9)  # what was under way for the one before
    assert reader.changed() == {}
    take(writer, row, b, 0.5)
    assert reader.changed() == {"b": 0.5}
    reader.forget(["b", "unknown"])
    take(writer, row, b, 0.0)
    assert reader.changed() == {}


def test_a_slot_changes_hands_unannounced(ends: tuple[EndWriter, EndReader]) -> None:
    writer, reader = ends
    a, b = reader.number("a"), reader.number("b")
    writer.hold(0, a)
    take(writer, 0, a, 0.5)
    writer.hold(1, a)  # it comes back, in another slot
    take(writer, 1, a, 0.25)
    assert reader.changed() == {"a": 0.25}
    writer.hold(0, b)
    take(writer, 0, 0, 0.9)  # a step in which b's prompt was not finished
    assert reader.changed() == {}
    writer.hold(0, 0)
    take(writer, 0, 0, 0.9)
    assert writer.numbers.tolist() == [0, a, 0, 0]
    assert np.isnan(writer.probabilities[0])


def test_a_table_left_behind_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "ends"
    path.write_bytes(b"left by a crash")
    EndWriter(path, 2).enter(7)
    EndReader(path)
    with pytest.raises(FileNotFoundError):
        EndReader(path)
    assert table_path("abc", 1) != table_path("abc", 0)


def test_a_probability_is_told_with_its_request_alone() -> None:
    state, request, other = EngineState(), Request("a", 3), Request("b", 3)
    requests = {"a": request, "b": other}
    for one in requests.values():
        state.arrived(one)
        state.admitted(one.request_id, 0)
        one.num_computed_tokens, one.num_output_tokens = 3, 1

    def advance(**ends: float) -> list[tuple[str, int, float | None]]:
        grown = {"a": 1, "b": 1}
        running = list(requests.values())
        step = Step(running, None, requests, (), grown, (), ends)
        told = [(row[0], row[2], row[5]) for row in state.advance(step).rows]
        for one in running:
            one.num_output_tokens += 1
            one.num_computed_tokens += 1
        return told

    assert advance(a=0.5) == [("a", 1, 0.5), ("b", 1, None)]
    assert advance() == []
    assert advance(b=0.25, gone=0.1) == [("b", 3, 0.25)]
    assert [(row[0], row[2], row[5]) for row in state.rows()] == [("a", 3, 0.5), ("b", 3, 0.25)]


def test_nothing_is_told_of_a_request_without_a_token() -> None:
    state, request = EngineState(), Request("a", 30)
    state.arrived(request)
    state.admitted("a", 0)
    request.num_computed_tokens = 20
    step = Step([request], {}, {"a": request}, (), {"a": 20}, (), {"a": 0.5})
    assert [row[5] for row in state.advance(step).rows] == [None]
    assert [row[5] for row in state.rows()] == [None]
