import itertools
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_patches.stream.rows import PlacedRow, ReportedRows, Row
from router.core.types import FREE_PLACE

ids = st.sampled_from("abcdef")


@st.composite
def rows(draw: st.DrawFn, id_: str) -> Row:
    small = st.integers(0, 3)
    probability = draw(st.none() | st.sampled_from([0.1, 0.9]))
    return (id_, draw(small), draw(small), draw(small), draw(small), probability)


@st.composite
def states(draw: st.DrawFn) -> dict[str, Row]:
    return {id_: draw(rows(id_)) for id_ in draw(st.lists(ids, unique=True))}


def grown(row: Row, tokens: int) -> Row:
    return (row[0], row[1], row[2] + tokens, *row[3:])


@st.composite
def histories(draw: st.DrawFn) -> list[dict[str, Row]]:
    """States of which each keeps, changes, drops and adds requests of the one before."""
    history = [draw(states())]
    for _ in range(draw(st.integers(0, 6))):
        gains = st.sampled_from([1, 1, 1, 0, 2, 300])
        state = {
            i: grown(row, draw(gains)) for i, row in history[-1].items() if draw(st.booleans())
        }
        history.append({**state, **draw(states())} if draw(st.booleans()) else state)
    return history


def apply_message(
    state: Mapping[str, PlacedRow],
    listed: list[PlacedRow],
    gone: tuple[str, ...],
    growths: bytes,
) -> dict[str, PlacedRow]:
    """What the documentation of ``Snapshot`` says that a receiver does."""
    after = {}
    for id_, row in state.items():
        gained = growths[row[6]] if growths else 1
        assert gained < FREE_PLACE
        after[id_] = (*row[:2], row[2] + gained, *row[3:])
    after.update({row[0]: row for row in listed})
    assert growths.count(FREE_PLACE) + len(state) == len(growths) or not growths
    return {id_: row for id_, row in after.items() if id_ not in gone}


@given(histories(), st.data())
def test_full_plus_messages_is_full(history: list[dict[str, Row]], data: st.DataObject) -> None:
    rows = ReportedRows(history[0].values())
    seen = {row[0]: row for row in rows.placed()}
    for before, after in itertools.pairwise(history):
        lost = sorted(before.keys() - after.keys())
        preempted = tuple(id_ for id_ in lost if data.draw(st.booleans()))
        told = tuple(id_ for id_ in lost if id_ not in preempted and data.draw(st.booleans()))
        last = [grown(before[id_], 3) for id_ in told if data.draw(st.booleans())]
        listed, finished, growths = rows.change([*after.values(), *last], told, preempted)
        assert sorted((*finished, *preempted)) == lost
        seen = apply_message(seen, listed, (*finished, *preempted), growths)
        assert {id_: row[:-1] for id_, row in seen.items()} == after
        assert seen == {row[0]: row for row in rows.placed()}
        assert len({row[6] for row in seen.values()}) == len(seen)


@given(states(), st.integers(1, 254))
def test_what_just_grew_is_not_listed(state: dict[str, Row], tokens: int) -> None:
    rows = ReportedRows(state.values())
    after = [grown(row, tokens) for row in state.values()]
    growths = b"" if tokens == 1 else bytes([tokens] * len(state))
    assert rows.change(after, (), ()) == ([], (), growths)


@pytest.mark.parametrize("tokens", [-1, 255, 256])
def test_what_no_byte_tells_is_listed(tokens: int) -> None:
    rows = ReportedRows([("a", 5, 9, 0, 0, None), ("b", 5, 9, 0, 0, None)])
    after: list[Row] = [("a", 5, 9 + tokens, 0, 0, None), ("b", 5, 10, 0, 0, None)]
    assert rows.change(after, (), ()) == ([(*after[0], 0)], (), b"")


@pytest.mark.parametrize(("stalled", "listed"), [(1, 1), (8, 8), (9, 0)])
def test_a_few_that_gained_nothing_are_listed_and_many_are_told_by_place(
    stalled: int, listed: int
) -> None:
    before: list[Row] = [(str(number), 5, 9, 0, 0, None) for number in range(20)]
    after = [*before[:stalled], *(grown(row, 1) for row in before[stalled:])]
    rows, _, growths = ReportedRows(before).change(after, (), ())
    assert len(rows) == listed
    assert growths == (b"" if listed else bytes([0] * stalled + [1] * (20 - stalled)))


def test_a_place_that_was_left_is_taken_by_a_later_message() -> None:
    rows = ReportedRows([("a", 5, 9, 0, 0, None), ("b", 5, 9, 0, 0, None)])
    listed, _, _ = rows.change([("b", 5, 10, 0, 0, None), ("c", 7, 1, 0, 0, None)], ("a",), ())
    assert [row[6] for row in listed] == [2]
    after: list[Row] = [("b", 5, 12, 0, 0, None), ("c", 7, 3, 0, 0, None), ("d", 7, 1, 0, 0, None)]
    listed, _, growths = rows.change(after, (), ())
    assert ([row[6] for row in listed], growths) == ([0], bytes([FREE_PLACE, 2, 2]))


@pytest.mark.parametrize("never_ran", [("x",), ("x", "y")])
def test_ends_of_requests_that_never_ran_are_passed_on(never_ran: tuple[str, ...]) -> None:
    assert ReportedRows(()).change((), never_ran, ()) == ([], never_ran, b"")
