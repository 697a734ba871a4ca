"""What every policy of the table keeps: ``policy.Policy.assign``, as ``rounds`` relies on it."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.policies.policy_protocol import Policy
from router.core.policies.policy_table import POLICIES, PolicySettings
from router.core.rounds import assignment as rounds
from router.core.state.worker import UNBOUNDED
from router.core.types import Assignment, Dispatch, Request, WorkerView
from tests.support.core import request, requests, views

every_policy = pytest.mark.parametrize("name", POLICIES)
every_instant_policy = pytest.mark.parametrize(
    "name", [name for name, row in POLICIES.items() if Dispatch.INSTANT in row.dispatch]
)

WAITING = st.lists(
    st.tuples(st.integers(0, 5000), st.sampled_from([1, 1, 1, 2, 5])), max_size=12
).map(lambda rows: [request(i, size, slots=slots) for i, (size, slots) in enumerate(rows)])
ROWS = st.lists(
    st.tuples(st.integers(0, 90_000), st.integers(-3, 4), st.integers(0, 9)), max_size=6
)
WORKERS = ROWS.map(lambda rows: views(*zip(*rows, strict=True)) if rows else [])
LIVE_WORKERS = WORKERS.filter(bool)


def make(name: str, seed: int = 0) -> Policy:
    return POLICIES[name].make(PolicySettings(seed=seed))


def replay(
    done: Sequence[Assignment], waiting: Sequence[Request], workers: Sequence[WorkerView]
) -> dict[str, int]:
    """Capacity left after these assignments, each checked when its turn comes."""
    slots = {one.id: one.slots for one in waiting}
    left = {worker.id: worker.capacity for worker in workers}
    for assignment in done:
        assert left[assignment.worker_id] > 0
        left[assignment.worker_id] -= slots.pop(assignment.request_id)
    return left


@every_policy
@given(waiting=WAITING, workers=WORKERS)
@settings(max_examples=60, deadline=None)
def test_contract(name: str, waiting: list[Request], workers: list[WorkerView]) -> None:
    asked = list(waiting), list(workers)
    done = make(name).assign(waiting, workers)
    assert (waiting, workers) == asked, "the arguments are the caller's"
    assert len({assignment.request_id for assignment in done}) == len(done)
    left = replay(done, waiting, workers)
    assert len(done) == len(waiting) or max(left.values(), default=0) <= 0


@every_policy
@given(waiting=WAITING, workers=LIVE_WORKERS)
@settings(max_examples=30, deadline=None)
def test_rounds_agree(name: str, waiting: list[Request], workers: list[WorkerView]) -> None:
    done = rounds.assign(make(name), [waiting[:4], waiting[4:]], workers)
    left = replay(done, waiting, workers)
    assert len(done) == len(waiting) or max(left.values()) <= 0


@every_policy
@given(sizes=st.lists(st.integers(0, 5000), max_size=12), workers=WORKERS)
@settings(max_examples=30, deadline=None)
def test_requests_of_one_slot_never_overrun(
    name: str, sizes: list[int], workers: list[WorkerView]
) -> None:
    waiting = requests(sizes)
    done = make(name).assign(waiting, workers)
    assert len(done) == min(len(waiting), sum(max(0, worker.capacity) for worker in workers))
    left = replay(done, waiting, workers)
    assert all(left[worker.id] >= min(0, worker.capacity) for worker in workers)


@every_policy
@given(waiting=WAITING, workers=LIVE_WORKERS)
@settings(max_examples=30, deadline=None)
def test_only_the_last_request_of_a_worker_overruns_it(
    name: str, waiting: list[Request], workers: list[WorkerView]
) -> None:
    done = make(name).assign(waiting, workers)
    for worker in workers:
        mine = [assignment for assignment in done if assignment.worker_id == worker.id]
        assert not mine or replay(mine[:-1], waiting, workers)[worker.id] > 0


@every_policy
@given(history=st.lists(st.tuples(WAITING, WORKERS), max_size=4), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_one_seed_and_one_history_give_one_answer(
    name: str, history: list[tuple[list[Request], list[WorkerView]]], seed: int
) -> None:
    one, other = make(name, seed), make(name, seed)
    for waiting, workers in history:
        assert one.assign(waiting, workers) == other.assign(waiting, workers)


@every_policy
@pytest.mark.parametrize(
    ("waiting", "workers"),
    [
        pytest.param([], [], id="nothing at all"),
        pytest.param([], views([5, 6]), id="nobody waits"),
        pytest.param(requests([5, 6]), [], id="no workers"),
        pytest.param(requests([5, 6]), views([5, 6], 0), id="no capacity"),
        pytest.param(requests([5, 6]), views([5, 6], -4), id="overrun already"),
        pytest.param([request(1, slots=3)], views([5, 6], 0), id="a wide one and no capacity"),
    ],
)
def test_nothing_to_assign(name: str, waiting: list[Request], workers: list[WorkerView]) -> None:
    assert list(make(name).assign(waiting, workers)) == []


@every_policy
@pytest.mark.parametrize("slots", [2, 3, 64])
def test_a_request_wider_than_any_worker_gets_in(name: str, slots: int) -> None:
    done = make(name).assign([request(1, slots=slots)], views([5, 6], [0, 1]))
    assert [assignment.worker_id for assignment in done] == ["b"]


@every_instant_policy
@given(waiting=WAITING, loads=st.lists(st.integers(0, 9000), min_size=1, max_size=6))
@settings(max_examples=20, deadline=None)
def test_instant_dispatch_sends_everybody(
    name: str, waiting: list[Request], loads: list[int]
) -> None:
    done = rounds.assign(make(name), [waiting], views(loads, UNBOUNDED))
    assert {assignment.request_id for assignment in done} == {one.id for one in waiting}
