import itertools
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_patches.stream.publisher import Row, changed_rows, ended_ids

ids = st.sampled_from("abcdef")


@st.composite
def rows(draw: st.DrawFn, id_: str) -> Row:
    small = st.integers(0, 3)
    probability = draw(st.none() | st.sampled_from([0.1, 0.9]))
    return (id_, draw(small), draw(small), draw(small), draw(small), probability)


@st.composite
def states(draw: st.DrawFn) -> dict[str, Row]:
    return {id_: draw(rows(id_)) for id_ in draw(st.lists(ids, unique=True))}


def grown(row: Row) -> Row:
    return (row[0], row[1], row[2] + 1, *row[3:])


@st.composite
def histories(draw: st.DrawFn) -> list[dict[str, Row]]:
    """States of which each keeps, changes, drops and adds requests of the one before."""
    history = [draw(states())]
    for _ in range(draw(st.integers(0, 6))):
        state = {id_: grown(row) for id_, row in history[-1].items() if draw(st.booleans())}
        history.append({**state, **draw(states())} if draw(st.booleans()) else state)
    return history


def apply_delta(
    state: Mapping[str, Row], changed: list[Row], gone: tuple[str, ...]
) -> dict[str, Row]:
    """What the documentation of ``Snapshot`` says that a receiver does."""
    after = {id_: grown(row) for id_, row in state.items() if id_ not in gone}
    after.update({row[0]: row for row in changed})
    return after


@given(histories(), st.data())
def test_full_plus_deltas_is_full(history: list[dict[str, Row]], data: st.DataObject) -> None:
    seen = history[0]
    for before, after in itertools.pairwise(history):
        lost = sorted(before.keys() - after.keys())
        preempted = tuple(id_ for id_ in lost if data.draw(st.booleans()))
        told = tuple(id_ for id_ in lost if id_ not in preempted and data.draw(st.booleans()))
        finished = ended_ids(before, after, told, preempted)
        assert sorted((*finished, *preempted)) == lost
        seen = apply_delta(seen, changed_rows(before, after.values()), (*finished, *preempted))
        assert seen == after


@given(states())
def test_what_just_grew_is_not_listed(state: dict[str, Row]) -> None:
    assert changed_rows(state, [grown(row) for row in state.values()]) == []


@pytest.mark.parametrize("never_ran", [("x",), ("x", "y")])
def test_ends_of_requests_that_never_ran_are_passed_on(never_ran: tuple[str, ...]) -> None:
    assert ended_ids({}, {}, never_ran, ()) == never_ran
