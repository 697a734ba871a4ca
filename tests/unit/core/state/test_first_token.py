"""When a newcomer's first token may be expected."""

import numpy as np
import pytest
from msgspec import structs

from router.core.events import SnapshotReceived
from router.core.state.cluster import Cluster
from router.core.state.first_token import expected_s
from router.core.step_time import StepBudget, StepTime
from router.core.types import Dispatch, Request, WorkerSpec
from tests.support.clusters import cluster_of, send
from tests.support.core import request, running, snapshot, token

COST = StepTime(0.1, per_prompt_token_s=1e-3)
ASKS = Request(token(99), "default", 100)


def two(rate: float | None = None, slots: int = 4) -> Cluster:
    cluster = cluster_of(
        *(WorkerSpec(i, f"http://{i}", slots=slots, service_rate=rate) for i in ("a", "b"))
    )
    cluster.groups["default"].fix_step_time(COST)
    return cluster


def lacking(*workers: str) -> Request:
    return Request(token(99), "default", 100, lacks=frozenset(workers))


def expected(
    cluster: Cluster, asks: Request = ASKS, slots: int = 0, *tokens: int, group: str = "default"
) -> float | None:
    ahead = np.array(tokens, dtype=np.int64)
    found = expected_s(asks, cluster.groups[group], Dispatch.POOL, slots, ahead)
    return None if found is None else found.seconds


def test_where_nothing_is_learned_nothing_is_expected() -> None:
    cluster = two()
    cluster.groups["default"].fix_step_time(None)
    assert expected(cluster) is None


def test_alone_it_takes_a_step_with_its_prompt() -> None:
    assert expected(two()) == pytest.approx(0.1 + 0.1)


def test_prompts_ahead_count_up_to_its_own_length_over_all_workers() -> None:
    assert expected(two(), ASKS, 2, 100, 1000) == pytest.approx(0.1 + 0.2)


def test_it_comes_first_where_the_least_is_pending() -> None:
    cluster = two()
    send(cluster, request(1, 700), "a")
    send(cluster, request(2, 500), "b")
    none, group = np.array([], dtype=np.int64), cluster.groups["default"]
    assert expected_s(ASKS, group, Dispatch.POOL, 0, none) == pytest.approx((0.7, 0.2))
    assert expected(cluster, lacking("b")) == pytest.approx(0.1 + 0.8)
    assert expected(cluster, lacking("a", "b")) is None


def test_what_is_cached_is_not_computed() -> None:
    cluster = two()
    cluster.groups["default"].prefix_hits = lambda _: [0, 90]
    assert expected(cluster) == pytest.approx(0.1 + 0.01)


def test_a_budget_makes_it_several_steps() -> None:
    cluster = two()
    cluster.groups["default"].prompt_budget = StepBudget(50, every=3)
    assert expected(cluster) == pytest.approx(2 * 3 * 0.1 + 0.1)


@pytest.mark.parametrize(("ahead", "step_s"), [(0, 0.9), (1000, 0.1)])
def test_who_steps_alone_waits_for_nobody(ahead: int, step_s: float) -> None:
    """Each of the requests that decode costs 0.1 s: nine at one worker, one at the other."""
    cluster = two(slots=40)
    group = cluster.groups["default"]
    for step in range(2, 40):
        for worker_id, count, first in (("a", 9, 0), ("b", 1, ahead)):
            runs = [running(f"theirs-{worker_id}{one}", 50, 1) for one in range(count)]
            told = structs.replace(snapshot("full", step, *runs), step=first + step, step_s=0.01)
            cluster.apply(SnapshotReceived(worker_id, told, 0.0))
    assert group.barrier is (not ahead)
    group.fix_step_time(StepTime(0.0, 0.0, 0.1, 1e-3))
    assert expected(cluster) == pytest.approx(step_s + 0.1)


def test_slots_for_half_of_those_that_lack_them_come_as_requests_end() -> None:
    cluster = two(rate=0.5, slots=1)
    send(cluster, request(1, 0), "a")
    send(cluster, request(2, 0), "b")
    assert expected(cluster, ASKS, 15) == pytest.approx(16 / 2 / (2 * 0.5) + 0.2)
    assert expected(two(slots=1), ASKS, 15) == pytest.approx(0.2), "no request has ended"


def test_prefill_workers_compute_what_is_ahead_first() -> None:
    specs = WorkerSpec("a", "", slots=4), WorkerSpec("p", "", role="prefill")
    cluster = cluster_of(*specs)
    stage = "default/prefill"
    assert expected(cluster, Request(token(99), stage, 100), group=stage) is None
    told = structs.replace(snapshot("full", 1), scheduled_prefill_tokens=100, step_s=0.1)
    cluster.apply(SnapshotReceived("p", told, 0.0))
    asks = Request(token(99), stage, 100)
    assert expected(cluster, asks, 2, 30, 70, group=stage) == pytest.approx(0.2)
    found = expected_s(asks, cluster.groups[stage], Dispatch.POOL, 2, np.array([100]))
    assert found == pytest.approx((0.2, 0.1))
