"""What the status page is sent."""

import msgspec

from router.admin.facts import Footing
from router.admin.page_state import Status
from router.core.events import WorkerDown
from router.core.forecast.end_signals import NoSignal
from router.core.forecast.look_ahead import LookAhead
from router.core.policies.bfio.policy import BfIo
from router.core.queue.pool import Pool
from router.core.rounds.decider import Decider
from router.core.state.breaker import DEFAULTS
from router.core.types import Dispatch, KvGroup, Outcome, RunningRequest, WorkerSpec
from tests.support.clusters import cluster_of, send, show
from tests.support.core import part, request, running, snapshot

SPECS = (
    WorkerSpec("a", "http://a", rank=0, slots=4, snapshots="tcp://a", service_rate=2.5),
    WorkerSpec("b", "http://b", rank=1, slots=4),
)


def test_of_a_router() -> None:
    cluster = cluster_of(*SPECS)
    group = cluster.groups["default"]
    ahead = LookAhead(NoSignal(), horizon=0)
    decider = Decider(group, Pool(8), BfIo(0.1), BfIo(0.1), Dispatch.POOL, ahead)
    decider.pool.add(request(1))
    decider.stats.outcomes |= {Outcome.COMPLETED: 3, Outcome.FAILED: 2, Outcome.EXPIRED: 1}
    decider.stats.ttft_s.observe(0.5)
    decider.stats.verdicts.update(met=3, queue=1)
    show(cluster, snapshot("full", 1, running(part(7), 100, 20), power_w=300.0))
    send(cluster, request(8, 50), "b")
    cluster.apply(WorkerDown("b", "gone"))
    for _ in range(DEFAULTS.breaker_failures):
        cluster.worker("a").breaker.failed("x", 1.0, suspect=False, may_open=True)
    status = Status(
        cluster,
        lambda: 1.5,
        {"default": decider},
        problem=lambda worker_id: f"{worker_id} is late",
        emulated=lambda worker_id: worker_id == "a",
    )

    state = msgspec.to_builtins(status.read(Footing("bfio")))

    (told,) = state["groups"]
    a, b = told["workers"]
    assert state["clock_s"] == 1.5
    assert (told["pool_requests"], told["emulated"], told["serves"]) == (1, True, None)
    assert (a["up"], a["load_tokens"], a["requests"], a["power_w"]) == (True, 120, 1, 300.0)
    assert (a["service_rate"], b["service_rate"]) == (2.5, None)
    assert (a["breaker"], b["breaker"]) == ("open", "closed")
    assert (a["source"], a["age_s"], a["problem"]) == ("snapshots", 0.5, "a is late")
    assert (b["up"], b["reason"], b["power_w"], b["kv_usage"]) == (False, "gone", None, None)
    assert (b["source"], b["age_s"], b["problem"]) == ("own", None, None)
    sums = told["sums"]
    assert (sums["completed"], sums["failed"], sums["first_token_s"]) == (3, 3, 0.5)
    assert (sums["targets"], sums["targets_met"]) == (4, 3)
    assert told["rule"]["policy"] == "bfio"
    assert told["rule"]["horizon"] == 0
    assert [fact["topic"] for fact in told["facts"]][:2] == ["Workers", "Loads"]


def test_what_queues_in_an_engine_is_apart_from_what_runs() -> None:
    cluster = cluster_of(*SPECS)
    for number in range(6):
        send(cluster, request(number, 50), "a")
        send(cluster, request(10 + number, 50), "b")
    shown = [running(part(number), 50, 1) for number in range(4)]
    show(cluster, msgspec.structs.replace(snapshot("full", 1, *shown), waiting=2))

    (told,) = Status(cluster, lambda: 0.0).read(Footing())["groups"]

    # One tells it, of the other one its slots do.
    assert [(each["requests"], each["queued"]) for each in told["workers"]] == [(6, 2), (6, 2)]
    assert told["barrier"] is None


def test_what_an_engine_s_plug_in_cannot_read_is_not_known() -> None:
    cluster = cluster_of(SPECS[0])
    groups = (KvGroup(16, 25, 100),)
    told = msgspec.structs.replace(snapshot("full", 1), kv_groups=groups)
    for unreported, kv_usage, problem in (
        ((), 0.25, None),
        (("memory", "slots"), None, "its engine's plug-in cannot read memory, slots"),
    ):
        show(cluster, msgspec.structs.replace(told, unreported=unreported))
        (group,) = Status(cluster, lambda: 0.0).read(Footing())["groups"]
        (worker,) = group["workers"]
        assert (worker["kv_usage"], worker["problem"]) == (kv_usage, problem)


def test_of_prompt_tokens_that_engines_had_cached() -> None:
    cluster = cluster_of(*SPECS)
    show(cluster, msgspec.structs.replace(snapshot("full", 1), cache_block=16))
    send(cluster, request(1, 100), "a")
    show(cluster, snapshot("full", 2, RunningRequest(part(1), 100, 1, 48)))

    (told,) = Status(cluster, lambda: 0.0).read(Footing())["groups"]

    sums = told["sums"]
    assert (sums["prefix_prompt_tokens"], sums["prefix_found_tokens"]) == (100, 48)


def test_where_nothing_is_routed() -> None:
    (told,) = Status(cluster_of(*SPECS), lambda: 0.0).read(Footing())["groups"]

    assert (told["rule"], told["pool_requests"], told["sums"]["completed"]) == (None, None, 0)


def test_of_engines_that_time_their_waits() -> None:
    cluster = cluster_of(SPECS[0])
    for number in (1, 2):
        told = snapshot("full", number, running(part(7), 100, 20), power_w=300.0, step_s=0.5)
        show(cluster, msgspec.structs.replace(told, waited_s=0.1))

    sums = Status(cluster, lambda: 0.0).read(Footing())["groups"][0]["sums"]

    assert (sums["steps"], sums["step_s"], sums["waiting_s"]) == (2, 1.0, 0.2)
    assert (sums["timed_s"], sums["measured_s"]) == (1.0, 1.0)
    joules = [sums[f"{name}_j"] for name in ("useful", "waiting", "idle", "undivided")]
    assert joules == [0, 0, 0, 300]
