"""No policy of the table exceeds what a worker's engine lets in, or leaves memory unused.

In tokens and blocks, alike or not, with an outlook, a step time, late requests or none.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.forecast.forecast import Outlook, WorkProfile
from router.core.kv_blocks import KvBlocks
from router.core.policies.policy_protocol import Known
from router.core.policies.policy_table import POLICIES, PolicySettings
from router.core.rounds import assignment
from router.core.rounds.assignment import receive
from router.core.step_time import StepTime
from router.core.types import KvGroup, Request, WorkerView
from tests.support.core import request

WINDOWED = KvBlocks.of([KvGroup(16, 0, 100), KvGroup(16, 0, 100, "sliding", 64, 0, 9, 5)])
STATE = KvBlocks.of([KvGroup(4096, 0, 100, "mamba", 0, 0, 1, 2)])
UNITS: list[list[KvBlocks | None]] = [
    [None],
    [WINDOWED],
    [STATE],
    [WINDOWED, None],
    [WINDOWED, KvBlocks.plain(32), None],
]
SIZES = st.sampled_from([0, 1, 16, 33, 100, 300, 900]) | st.integers(1, 500)
WAITING = st.lists(st.tuples(SIZES, st.sampled_from([1, 1, 1, 2, 3])), min_size=1, max_size=10).map(
    lambda rows: [request(i, size, slots=slots) for i, (size, slots) in enumerate(rows)]
)


@st.composite
def workers_of(draw: st.DrawFn) -> list[WorkerView]:
    """Workers of one group; what each counts in comes from one of ``UNITS``."""
    units = draw(st.sampled_from(UNITS))

    def worker(number: int) -> WorkerView:
        kv = draw(st.sampled_from(units))
        return WorkerView(
            f"w{number}",
            load_tokens=draw(st.integers(0, 9000)),
            requests=draw(st.sampled_from([0, 1, 5])),
            capacity=draw(st.integers(-1, 4)),
            admissible_tokens=draw(st.sampled_from([None, 0, 50, 400, 1500])),
            pending_prompt_tokens=draw(st.integers(0, 900)),
            admissible_blocks=draw(st.integers(0, 60)) if kv else None,
            kv=kv,
        )

    return [worker(number) for number in range(draw(st.integers(1, 5)))]


def known_of(draw: st.DrawFn, workers: list[WorkerView], *, ahead: bool) -> Known:
    step_time = draw(st.sampled_from([None, StepTime(5e-3, 1e-7, 0, 1e-5)]))
    if not ahead or draw(st.booleans()):
        return Known(None, step_time)
    beta, window = draw(st.sampled_from([0.0, 50.0])), draw(st.sampled_from([None, 64]))
    profile = WorkProfile(prefill_beta=beta, window=window)
    work = np.array([[float(one.load_tokens + step) for step in range(3)] for one in workers])
    return Known(Outlook(work, profile, 0.8, 0.01, 20.0), step_time)


@pytest.mark.parametrize("name", POLICIES)
@given(waiting=WAITING, workers=workers_of(), urgent=st.integers(0, 3), data=st.data())
@settings(max_examples=60, deadline=None)
def test_memory_is_kept_and_room_is_used(
    name: str,
    waiting: list[Request],
    workers: list[WorkerView],
    urgent: int,
    data: st.DataObject,
) -> None:
    policy = POLICIES[name].make(PolicySettings(moves=300))
    tiers = [tier for tier in (waiting[:urgent], waiting[urgent:]) if tier]
    late_since = data.draw(st.sampled_from([-math.inf, math.inf]))
    known = data.draw(st.composite(known_of)(workers, ahead=POLICIES[name].looks_ahead))
    done = assignment.assign(policy, tiers, workers, known, late_since=late_since)
    by_id = {one.id: one for one in waiting}
    now = {worker.id: worker for worker in workers}
    for request_id, worker_id in done:
        assert now[worker_id].takes(by_id[request_id])
        now[worker_id] = receive(now[worker_id], [by_id.pop(request_id)])
    assert len(done) + len(by_id) == len(waiting)
    first = tiers[0][:1] if late_since > 0 else tiers[0]
    if any(worker.takes(one) for worker in workers for one in first):
        assert done, "a request had room somewhere"
    if len(tiers) == 1 and late_since < 0:
        left = [one for one in by_id.values() if one.prompt_tokens]
        assert not any(worker.takes(one) for worker in now.values() for one in left)
