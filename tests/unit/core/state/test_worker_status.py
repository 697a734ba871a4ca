"""What readers are shown of one worker."""

import msgspec

from router.core.state.worker_status import status_of
from router.core.types import DEFAULT_SLOTS, StateSource, WorkerSpec, prefill_stage
from tests.support.clusters import cluster_of, send, show
from tests.support.core import part, request, running, snapshot

SPEC = WorkerSpec("a", "http://a", slots=4, snapshots="tcp://a")


def test_without_snapshots_the_routers_own_counts_are_shown() -> None:
    cluster = cluster_of(SPEC)
    for number in range(6):
        send(cluster, request(number, 50))

    status = status_of(cluster.worker("a"), 7.0)

    assert (status.spec, status.up, status.source) == (SPEC, True, StateSource.OWN)
    assert (status.requests, status.in_flight, status.load_tokens) == (6, 6, 300)
    assert (status.free_slots, status.queued) == (0, 2)
    assert (status.running, status.waiting, status.slots_reported) == (None, None, None)
    assert (status.age_s, status.kv_usage, status.kept_tokens) == (None, None, None)


def test_with_snapshots_the_engines_are() -> None:
    cluster = cluster_of(SPEC)
    shown = [running(part(number), 50, 1) for number in range(3)]
    show(cluster, msgspec.structs.replace(snapshot("full", 1, *shown), waiting=2, max_loras=3))

    status = status_of(cluster.worker("a"), 7.0)

    assert (status.source, status.age_s) == (StateSource.SNAPSHOTS, 6.0)
    assert (status.running, status.waiting, status.queued) == (3, 2, 2)
    assert (status.sequence, status.requests) == (1, 5)
    assert (status.unreported, status.shortcoming, status.max_loras) == ((), None, 3)


def test_what_an_engine_s_plug_in_cannot_read_is_not_known() -> None:
    cluster = cluster_of(WorkerSpec("a", "http://a", snapshots="tcp://a"))
    lacking = "memory", "slots"
    show(cluster, msgspec.structs.replace(snapshot("full", 1), unreported=lacking))

    status = status_of(cluster.worker("a"), 7.0)

    assert (status.slots, status.slots_reported, status.kv_usage) == (DEFAULT_SLOTS, None, None)
    assert status.unreported == lacking
    assert status.shortcoming == "its engine's plug-in cannot read memory, slots"


def test_only_prefill_workers_keep_prompts() -> None:
    decode, prefill = WorkerSpec("d", "http://d"), WorkerSpec("p", "http://p", role="prefill")
    cluster = cluster_of(decode, prefill)

    assert "p" in cluster.groups[prefill_stage("default")].workers
    assert status_of(cluster.worker("p"), 0.0).kept_tokens == 0
    assert status_of(cluster.worker("d"), 0.0).kept_tokens is None
