"""Which prompts of a group with prefill workers are computed without these."""

from dataclasses import replace

import pytest
from msgspec import structs

from router.core.events import SnapshotReceived, WorkerDown
from router.core.prefix.ids import ID_BYTES, chain, seed
from router.core.state.cluster import Cluster
from router.core.state.prefill_worker import PrefillWorker
from router.core.state.short_misses import sooner_at
from router.core.step_fit import NUMBERS, FittedStepTime
from router.core.step_time import StepTime
from router.core.types import Content, Dispatch, Request, Snapshot, WorkerSpec
from tests.support.clusters import cluster_of
from tests.support.core import running, snapshot, token

STAGE = "default/prefill"
TOKENS = 160
PIECES = chain(range(TOKENS), seed())
ASKS = Request(token(1), STAGE, TOKENS, content=Content(pieces=PIECES))
MISS = 16
"""Of its tokens, where all but the last block are cached."""


def split() -> Cluster:
    """Two workers that answer, the second with the prompt; a prefill worker at 1 ms a token."""
    specs = WorkerSpec("a", "", slots=40), WorkerSpec("b", "", slots=40)
    cluster = cluster_of(*specs, WorkerSpec("p", "", role="prefill"))
    hear(cluster, "p", structs.replace(told(0), scheduled_prefill_tokens=100, step_s=0.1))
    hear(cluster, "a", told(0))
    hear(cluster, "b", told(TOKENS))
    return cluster


def told(cached: int, *runs: int, sequence: int = 1) -> Snapshot:
    """A worker that has cached so many tokens of the prompt, and runs these others'."""
    full = snapshot("full", sequence, *(running(f"theirs-{one}", 50, 1) for one in runs))
    return structs.replace(full, cache_block=16, blocks_stored=PIECES[: ID_BYTES * cached // 16])


def hear(cluster: Cluster, worker_id: str, message: Snapshot) -> None:
    cluster.apply(SnapshotReceived(worker_id, message, 0.0))


def chosen(cluster: Cluster, request: Request = ASKS) -> str | None:
    return sooner_at(request, cluster.groups["default"])


def test_a_short_miss_is_computed_where_the_rest_is_cached() -> None:
    """16 ms for itself and nobody else, where the prefill worker needs 160 ms."""
    assert chosen(split()) == "b"


@pytest.mark.parametrize(("others", "sooner"), [(8, True), (9, False)])
def test_all_that_wait_for_each_other_lose_the_time(others: int, sooner: bool) -> None:
    """160 ms at the prefill worker; here 16 ms for each, itself included."""
    cluster = split()
    hear(cluster, "a", told(0, *range(others), sequence=2))
    assert (chosen(cluster) == "b") == sooner


def test_who_steps_alone_delays_its_own_requests() -> None:
    cluster = split()
    for step in range(2, 40):
        for worker_id, cached, first in (("a", 0, 0), ("b", TOKENS, 1000)):
            message = told(cached, *range(9 - cached // 40), sequence=step)
            hear(cluster, worker_id, structs.replace(message, step=first + step, step_s=0.01))
    group = cluster.groups["default"]
    requests = [view.requests for view in group.views(Dispatch.POOL)]
    assert (group.barrier, requests) == (False, [9, 5])
    group.fix_step_time(StepTime(1.0, per_prompt_token_s=1.6e-3))
    assert chosen(cluster) == "b", "6 * 25.6 ms"
    group.fix_step_time(StepTime(1.0, per_prompt_token_s=1.7e-3))
    assert chosen(cluster) is None


def test_prompts_before_it_take_time_at_either_place() -> None:
    cluster = split()
    hear(cluster, "b", told(TOKENS, 1, sequence=2))
    busy = snapshot("full", 3, running("theirs", 200, 0, prefill_left=144))
    hear(cluster, "b", structs.replace(busy, cache_block=16, blocks_stored=PIECES))
    assert chosen(cluster) is None, "144 + 2 * 16 ms"
    at_p = structs.replace(busy, cache_block=16)
    hear(cluster, "p", at_p)
    assert chosen(cluster) == "b", "160 + 144 ms there"


def test_what_the_prefill_worker_has_cached_it_need_not_compute() -> None:
    cluster = split()
    hear(cluster, "p", told(TOKENS, sequence=2))
    assert chosen(cluster) is None


def test_a_worker_without_slot_or_model_computes_nothing() -> None:
    cluster = split()
    assert chosen(cluster, replace(ASKS, slots=41)) is None
    assert chosen(cluster, replace(ASKS, lacks=frozenset("b"))) is None


def test_nothing_is_sooner_while_it_is_not_known_how_fast_prefill_workers_are() -> None:
    specs = WorkerSpec("a", ""), WorkerSpec("p", "", role="prefill")
    assert chosen(cluster_of(*specs)) is None
    assert chosen(cluster_of()) is None
    cluster = split()
    cluster.apply(WorkerDown("p", "gone"))
    assert chosen(cluster) is None


@pytest.mark.parametrize(
    ("cost", "sooner"),
    [
        (StepTime(1.0), True),
        (StepTime(1.0, per_prompt_token_s=9e-3), True),
        (StepTime(1.0, per_prompt_token_s=11e-3), False),
        (FittedStepTime(1.0, per_prompt_token_s=1.0, known=()), True),
        (FittedStepTime(1.0, per_prompt_token_s=1.0, known=NUMBERS), False),
        (FittedStepTime(1.0, known=NUMBERS, predicting=(1, 0, 0, 1e-3, 0, 0.14, 0)), True),
        (FittedStepTime(1.0, known=NUMBERS, predicting=(1, 0, 0, 1e-3, 0, 0.15, 0)), False),
        (FittedStepTime(1.0, known=NUMBERS, predicting=(1, 0, 0, 0, 1e-4, 0, 0)), False),
    ],
)
def test_a_prompt_costs_what_steps_have_taught(cost: StepTime, sooner: bool) -> None:
    """A fixed cost without prompts says nothing of them: then they cost as much as there."""
    cluster = split()
    cluster.groups["default"].fix_step_time(cost)
    assert (chosen(cluster) == "b") == sooner


def test_the_speed_of_a_prefill_worker_is_that_of_its_steps_with_prompts() -> None:
    worker = split().worker("p")
    assert isinstance(worker, PrefillWorker)
    assert worker.token_s == pytest.approx(1e-3)
    worker.receive(structs.replace(told(0, sequence=2), step_s=5.0), 0.0)
    assert worker.token_s == pytest.approx(1e-3), "it computed no prompt"
    for sequence in range(3, 1000):
        faster = structs.replace(told(0, sequence=sequence), scheduled_prefill_tokens=100)
        worker.receive(structs.replace(faster, step_s=0.05), 0.0)
    assert worker.token_s == pytest.approx(0.5e-3, rel=0.02), "what is old is forgotten"
