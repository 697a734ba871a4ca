"""Output tokens per request in decode and step, as a group's engines show them."""

import msgspec
import pytest

from router.core.events import SnapshotReceived, WorkerUp
from router.core.state.cluster import Cluster
from router.core.state.rates import GROWTH_STEPS, Growth
from router.core.types import RunningRequest, WorkerSpec
from tests.support.core import snapshot


def test_without_drafts_it_is_exactly_one() -> None:
    growth = Growth()
    assert growth.mean == 1.0
    for requests in (3, 0, 7, 256, 1, 1024):
        growth.add(requests, requests)
    assert growth.mean == 1.0


def test_it_is_a_mean_over_requests_that_follows_the_engines() -> None:
    growth = Growth()
    growth.add(3, 1)
    growth.add(3, 3)
    assert growth.mean == pytest.approx(1.5, rel=1e-3)
    for _ in range(int(5 * GROWTH_STEPS)):
        growth.add(5, 2)
    assert growth.mean == pytest.approx(2.5, rel=1e-2)
    growth.add(-7, 1)
    assert growth.mean > 0


def test_a_group_learns_it_from_its_snapshots() -> None:
    cluster = Cluster([WorkerSpec("a", "http://a", slots=4)])
    cluster.apply(WorkerUp("a"))
    rows = (RunningRequest("x", 9, 1, place=0), RunningRequest("y", 9, 1, place=1))
    told = (
        snapshot("full", 1, *rows),
        snapshot("delta", 2),
        msgspec.structs.replace(snapshot("delta", 3), kind="growth", growths=b"\3\1"),
    )
    means = []
    for message in told:
        cluster.apply(SnapshotReceived("a", message, 0.0))
        means.append(cluster.groups["default"].growth)
    assert means == [1.0, 1.0, pytest.approx(1.5, rel=1e-3)]
