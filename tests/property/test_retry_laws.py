"""Where requests go that workers have failed, whoever decides."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.policies.policy_table import POLICIES, PolicySettings
from router.core.queue.pool import Pool
from router.core.rounds import assignment
from router.core.types import Dispatch, WorkerView
from tests.support.core import request

NAMES = "abcd"
IDS = st.frozensets(st.sampled_from(NAMES))
WAITING = st.lists(st.tuples(st.integers(1, 500), st.integers(1, 2), IDS), max_size=12)
WORKERS = st.lists(
    st.tuples(st.integers(0, 900), st.integers(0, 4), st.none() | st.integers(0, 900)),
    min_size=len(NAMES),
    max_size=len(NAMES),
)


@pytest.mark.parametrize(
    "name", [n for n, row in POLICIES.items() if Dispatch.POOL in row.dispatch]
)
@given(waiting=WAITING, workers=WORKERS, askable=IDS)
def test_nobody_goes_back_to_who_has_failed_it_while_another_can_be_asked(
    name: str,
    waiting: list[tuple[int, int, frozenset[str]]],
    workers: list[tuple[int, int, int | None]],
    askable: frozenset[str],
) -> None:
    pool = Pool(100)
    for number, (tokens, slots, avoid) in enumerate(waiting):
        pool.add(replace(request(number, tokens, slots=slots), avoid=avoid))
    views = [
        WorkerView(worker_id, load, 1, capacity, admissible_tokens=room)
        for worker_id, (load, capacity, room) in zip(NAMES, workers, strict=True)
    ]
    capacity = sum(view.capacity for view in views)
    policy = POLICIES[name].make(PolicySettings(seed=0, moves=50))

    made = assignment.assign(policy, pool.tiers(0.0, capacity, 0), views, askable=askable)

    asked = {each.id: each for each in pool}
    assert len({request_id for request_id, _ in made}) == len(made)
    free = {view.id: view.capacity for view in views}
    for request_id, worker_id in made:
        avoid = asked[request_id].avoid
        assert worker_id not in avoid or not askable - avoid
        assert free[worker_id] > 0
        free[worker_id] -= asked[request_id].slots
