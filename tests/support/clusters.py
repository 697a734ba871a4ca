"""Clusters whose workers are up, and short ways to move them."""

from enum import Enum

from router.core.events import Arrived, Began, Dispatched, SnapshotReceived, WorkerUp
from router.core.state.cluster import Cluster
from router.core.state.worker import Worker
from router.core.types import Request, Snapshot, WorkerSpec


def cluster_of(*specs: WorkerSpec) -> Cluster:
    cluster = Cluster(specs or (WorkerSpec("a", "http://a"), WorkerSpec("b", "http://b")))
    for spec in specs or (WorkerSpec("a", ""), WorkerSpec("b", "")):
        cluster.apply(WorkerUp(spec.id))
    return cluster


class Phase(Enum):
    """Of a request in the router; one without a prefill stage is ready on arrival."""

    ARRIVED = "arrived"
    PREFILLING = "prefilling"
    READY = "ready"
    DECODING = "decoding"
    ENDED = "ended"


def phase(cluster: Cluster, request_id: str) -> Phase:
    if not cluster.knows(request_id):
        return Phase.ENDED
    tracked = cluster._requests[request_id]
    if cluster.groups[tracked.request.group].serves is None:
        return Phase.READY if tracked.worker is None else Phase.DECODING
    return Phase.ARRIVED if tracked.worker is None else Phase.PREFILLING


def send(
    cluster: Cluster, sent: Request, worker_id: str = "a", now_s: float | None = None
) -> Worker:
    cluster.apply(Arrived(sent))
    cluster.apply(Dispatched(sent.id, worker_id, now_s))
    return cluster.worker(worker_id)


def begin(cluster: Cluster, sent: Request, worker_id: str = "a") -> Worker:
    """Send it; the first byte of its answer comes, so its prompt is computed."""
    worker = send(cluster, sent, worker_id)
    cluster.apply(Began(sent.id, worker_id, 0.0))
    return worker


def show(cluster: Cluster, *snapshots: Snapshot, worker_id: str = "a") -> list[bool]:
    return [cluster.apply(SnapshotReceived(worker_id, message, 1.0)) for message in snapshots]


def figures(worker: Worker) -> tuple[int, int, int]:
    return worker.load_tokens, worker.requests, worker.in_flight
