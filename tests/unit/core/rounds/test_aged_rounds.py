"""Where prompts are planned: those without patience are not kept out, whatever they may have."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from msgspec import structs

from router.core.events import SnapshotReceived, WorkerUp
from router.core.forecast.end_signals import CapSignal
from router.core.forecast.look_ahead import LookAhead
from router.core.policies.baselines import PerRequest, fcfs
from router.core.policies.bfio.policy import BfIo
from router.core.queue.pool import Pool
from router.core.rounds.decider import Decider
from router.core.state.cluster import Cluster
from router.core.step_time import StepTime
from router.core.types import Dispatch, Request, WorkerSpec
from tests.support.core import request, running, snapshot

NOW_S, PATIENCE_S, WORKERS = 10.0, 5.0, "abc"
UNLIMITED = 10**6


def sent(waiting: Sequence[Request], *rooms: int) -> dict[str, str]:
    """Worker by the request's id, after a round; each worker runs a request and has such room."""
    cluster = Cluster(WorkerSpec(name, name, slots=64) for name in WORKERS)
    for name, room in zip(WORKERS, rooms, strict=True):
        cluster.apply(WorkerUp(name))
        told = structs.replace(
            snapshot("full", 1, running(name)), worker=name, admissible_kv_tokens=room
        )
        cluster.apply(SnapshotReceived(name, told, 0.0))
    cluster.fix_step_time(StepTime(5e-3, 1e-7, 0.0, 1e-5))
    pool = Pool(100, PATIENCE_S)
    decider = Decider(
        cluster.groups["default"],
        pool,
        BfIo(0.1),
        PerRequest(fcfs),
        Dispatch.POOL,
        LookAhead(CapSignal()),
    )
    decider.follow()
    for one in waiting:
        pool.add(one)
    done = decider.decide(NOW_S, lambda: NOW_S)
    assert decider.stats.policy_errors == 0
    return dict(done)


LATE = request(1, 400)
SMALL = [request(number, 40, arrival=9.0) for number in range(2, 12)]


@pytest.mark.parametrize("arrival", [0.0, 9.0])
def test_the_roomiest_worker_is_kept_for_a_late_request_that_fits_nowhere(arrival: float) -> None:
    found = sent([replace(LATE, arrival_s=arrival), *SMALL], 300, 100, 100)
    assert set(found.values()) == ({"b", "c"} if arrival == 0 else {"a", "b", "c"})


def test_it_is_kept_from_its_own_priority_too() -> None:
    low = [replace(one, priority=1) for one in (LATE, *SMALL)]
    found = sent([request(99, 10, arrival=9.0), *low], 300, 100, 100)
    assert {found[one.id] for one in SMALL if one.id in found} == {"b", "c"}


def test_a_worker_that_does_not_serve_its_model_is_no_place_for_it() -> None:
    model = [replace(one, lacks=frozenset("c")) for one in (LATE, *SMALL)]
    found = sent(model, 300, 100, 900)
    assert set(found.values()) == {"b"}


def test_a_worker_that_failed_it_is_no_place_for_it() -> None:
    failed = [replace(one, avoid=frozenset("c")) for one in (LATE, *SMALL)]
    found = sent(failed, 300, 100, 900)
    assert set(found.values()) == {"b"}


def test_who_may_go_anywhere_is_not_kept_out_by_those_that_may_not() -> None:
    """Each worker has a queue of its own, endless and of prompts that fill its next step."""
    others = [frozenset(WORKERS) - {name} for name in WORKERS]
    queues = [
        replace(request(number, 50_000, arrival=9.0), lacks=others[number % 3])
        for number in range(2, 14)
    ]
    rooms = [UNLIMITED] * 3
    assert LATE.id in sent([LATE, *queues], *rooms)
    young = replace(LATE, arrival_s=9.0)
    assert young.id not in sent([young, *queues], *rooms)
