"""What the cluster learns of its workers from their answers."""

import pytest

from router.core.events import (
    Arrived,
    Began,
    Dispatched,
    Event,
    Failed,
    Refused,
    RestRequested,
    Succeeded,
    WorkerUp,
)
from router.core.state.breaker import BreakerSettings, BreakerState
from router.core.state.cluster import Cluster
from router.core.types import Dispatch, WorkerSpec
from tests.support.core import request, token

NOW_S = 100.0


@pytest.fixture
def cluster() -> Cluster:
    """Two workers, ejected after two failures in a row; a request at the first."""
    cluster = Cluster(
        [WorkerSpec(i, f"http://{i}", slots=4) for i in "ab"],
        breakers=BreakerSettings(breaker_failures=2),
    )
    for worker_id in "ab":
        cluster.apply(WorkerUp(worker_id))
    cluster.apply(Arrived(request(1)))
    cluster.apply(Dispatched(token(1), "a", NOW_S))
    return cluster


@pytest.mark.parametrize(
    "good", [Succeeded(token(1), "a", NOW_S), Began(token(1), "a", NOW_S)], ids=["whole", "stream"]
)
def test_failures_count_until_a_success(cluster: Cluster, good: Event) -> None:
    failed = Failed(token(1), "a", NOW_S)
    for event in (failed, good, failed):
        cluster.apply(event)
    assert cluster.worker("a").breaker.state is BreakerState.CLOSED
    cluster.apply(failed)
    assert cluster.worker("a").breaker.state is BreakerState.OPEN


def test_an_error_that_begins_is_no_success(cluster: Cluster) -> None:
    cluster.apply(Failed(token(1), "a", NOW_S))
    cluster.apply(Began(token(1), "a", NOW_S, good=False))
    cluster.apply(Failed(token(1), "a", NOW_S))
    assert cluster.worker("a").breaker.state is BreakerState.OPEN


def test_a_worker_that_asks_for_a_pause_gets_no_requests(cluster: Cluster) -> None:
    cluster.apply(Refused(token(1), "a"))
    cluster.apply(RestRequested("a", NOW_S, 2.0))
    group = cluster.group_of("a")
    assert [view.capacity for view in group.views(Dispatch.POOL)] == [0, 4]
    group.review(NOW_S + 2.1)
    assert [view.capacity for view in group.views(Dispatch.POOL)] == [3, 4]


def test_an_answer_of_a_worker_that_has_left_shows_nothing(cluster: Cluster) -> None:
    cluster.leave("b")
    cluster.apply(Failed(token(1), "b", NOW_S))
    assert [*cluster.groups["default"].workers] == ["a"]
