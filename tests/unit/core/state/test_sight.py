"""What a worker's snapshots show of a request that was sent there."""

from router.core.events import Arrived, Ended
from router.core.state.cluster import Cluster
from router.core.types import Outcome, Sight
from tests.support.clusters import cluster_of, send, show
from tests.support.core import part, request, running, snapshot, token


def sight(cluster: Cluster) -> Sight:
    return cluster.sight(token(1))


def test_a_request_is_seen_until_its_engine_has_finished_it() -> None:
    cluster = cluster_of()
    send(cluster, request(1, 100))
    assert sight(cluster) is Sight.HERE, "nobody tells otherwise"
    show(cluster, snapshot("full", 1))
    assert sight(cluster) is Sight.UNSEEN
    show(cluster, snapshot("delta", 2, waiting=1))
    assert sight(cluster) is Sight.HERE, "it may be the one that waits"
    show(cluster, snapshot("delta", 3, running(part(1), 98, 1)))
    assert sight(cluster) is Sight.HERE
    show(cluster, snapshot("delta", 4, finished=(part(1),)))
    assert sight(cluster) is Sight.ENDED


def test_one_that_was_there_may_be_gone_without_its_end() -> None:
    cluster = cluster_of()
    send(cluster, request(1, 100))
    show(cluster, snapshot("full", 1, running(part(1), 98, 1)), snapshot("full", 2))
    assert sight(cluster) is Sight.LOST


def test_what_waits_at_the_router_or_has_ended_is_at_no_worker() -> None:
    cluster = cluster_of()
    cluster.apply(Arrived(request(1, 100)))
    assert sight(cluster) is Sight.ENDED
    cluster.apply(Ended(token(1), Outcome.COMPLETED))
    assert sight(cluster) is Sight.ENDED
