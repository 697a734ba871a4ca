"""No policy of the table fills a worker's memory beyond what its engine lets in."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from router.core.policies.policy_table import POLICIES, PolicySettings
from router.core.rounds import assignment
from router.core.rounds.assignment import receive
from router.core.types import Request, WorkerView
from tests.support.core import request, views

WAITING = st.lists(
    st.tuples(st.integers(1, 500), st.sampled_from([1, 1, 2])), min_size=1, max_size=12
).map(lambda rows: [request(i, size, slots=slots) for i, (size, slots) in enumerate(rows)])
ROWS = st.tuples(
    *(st.integers(0, 90_000), st.integers(0, 4), st.integers(0, 3)),
    st.none() | st.integers(0, 1500),
)
WORKERS = st.lists(ROWS, min_size=1, max_size=5).map(
    lambda rows: [
        replace(view, admissible_tokens=room)
        for view, (*_, room) in zip(
            views([row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]),
            rows,
            strict=True,
        )
    ]
)


@pytest.mark.parametrize("name", POLICIES)
@given(waiting=WAITING, workers=WORKERS, urgent=st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_memory_is_kept_and_room_is_used(
    name: str, waiting: list[Request], workers: list[WorkerView], urgent: int
) -> None:
    policy = POLICIES[name].make(PolicySettings())
    tiers = [tier for tier in (waiting[:urgent], waiting[urgent:]) if tier]
    done = assignment.assign(policy, tiers, workers)
    by_id = {one.id: one for one in waiting}
    now = {worker.id: worker for worker in workers}
    for request_id, worker_id in done:
        assert fits(now[worker_id], by_id[request_id])
        now[worker_id] = receive(now[worker_id], [by_id.pop(request_id)])
    assert len(done) + len(by_id) == len(waiting)
    first = waiting[:urgent] or waiting
    if any(fits(worker, one) for worker in workers for one in first):
        assert done, "a request had room somewhere"


def fits(worker: WorkerView, one: Request) -> bool:
    room = worker.admissible_tokens
    memory = room is None or one.load_tokens <= room or not worker.requests
    return worker.capacity > 0 and memory
