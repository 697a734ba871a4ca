"""Steps until a request that is sent is computed, learned."""

from dataclasses import replace

import pytest
from msgspec import structs

from router.core.events import Ended, FeedStale
from router.core.state.cluster import Cluster
from router.core.state.rates import SendDelay
from router.core.step_time import StepBudget
from router.core.types import Outcome, Snapshot, WorkerSpec
from tests.support.clusters import cluster_of, send, show
from tests.support.core import part, request, running, snapshot, token

ENOUGH = 200


def under_way(cluster: Cluster) -> int:
    return cluster.groups["default"].steps_under_way


def test_at_first_one_step_has_begun() -> None:
    assert SendDelay().steps == 1


@pytest.mark.parametrize(("steps", "learned"), [(0, 0), (3, 3), (1000, 16), (-5, 1)])
def test_the_latest_requests_tell(steps: int, learned: int) -> None:
    delay = SendDelay()
    for _ in range(ENOUGH):
        delay.learn(steps)
    assert delay.steps == learned


def test_a_part_of_a_step_counts_as_a_whole_one() -> None:
    delay = SendDelay()
    for number in range(ENOUGH):
        delay.learn(number % 2)
        assert delay.steps == 1


def test_one_request_that_was_held_up_says_little() -> None:
    delay = SendDelay()
    delay.learn(1000)
    assert delay.steps == 1


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_steps_between_sending_and_computing_are_counted(steps: int) -> None:
    cluster = cluster_of(WorkerSpec("a", "", slots=2))
    show(cluster, snapshot("full", 1, running("theirs")))
    at = 1
    for number in range(ENOUGH):
        send(cluster, request(number))
        for _ in range(steps):
            at += 1
            show(cluster, snapshot("delta", at))
        at += 1
        show(cluster, snapshot("delta", at, running(part(number), generated_tokens=1)))
        at += 1
        show(cluster, snapshot("delta", at, finished=(part(number),)))
        cluster.apply(Ended(token(number), Outcome.COMPLETED))
    assert under_way(cluster) == steps


@pytest.mark.parametrize(("every", "steps"), [(1, 9), (4, 2), (20, 0)])
def test_steps_that_compute_no_prompts_do_not_count(every: int, steps: int) -> None:
    group = cluster_of(WorkerSpec("a", "")).groups["default"]
    group.rates.delay = SendDelay(9)
    group.prompt_budget = StepBudget(512, every)
    assert group.steps_under_way == steps


# What its first step depends on beyond its way.
IDLE = snapshot("full", 1)
QUEUE = snapshot("full", 1, running("theirs"), waiting=1)
PROMPT = snapshot("full", 1, running("theirs", 50, 0, prefill_left=20))
FULL = snapshot("full", 1, running("theirs"), running("others"))


FREE = snapshot("full", 1, running("theirs"))


@pytest.mark.parametrize(
    ("before", "computed"),
    [(IDLE, False), (QUEUE, False), (PROMPT, False), (FULL, False), (FREE, True)],
    ids=["idle", "queue", "prompt", "full", "fetches"],
)
def test_who_may_wait_in_the_engine_tells_nothing(before: Snapshot, computed: bool) -> None:
    cluster = cluster_of(WorkerSpec("a", "", slots=2))
    for number in range(ENOUGH):
        show(cluster, structs.replace(before, epoch=f"e{number}"))
        send(cluster, replace(request(number), computed=computed))
        late = snapshot("full", 9, running("theirs"), running(part(number)), epoch=f"e{number}")
        show(cluster, late)
        cluster.apply(Ended(token(number), Outcome.COMPLETED))
    assert under_way(cluster) == 1


def test_what_an_engine_shows_after_its_restart_tells_nothing() -> None:
    cluster = cluster_of(WorkerSpec("a", "", slots=2))
    for number in range(ENOUGH):
        show(cluster, snapshot("full", 500, running("theirs"), epoch=f"a{number}"))
        send(cluster, request(number))
        cluster.apply(FeedStale("a"))
        told = running("theirs"), running(part(number))
        show(cluster, snapshot("full", 1, *told, epoch=f"b{number}"))
        cluster.apply(Ended(token(number), Outcome.COMPLETED))
    assert under_way(cluster) == 1


@pytest.mark.parametrize(("over_s", "learned"), [(0.0, 3), (0.25, 3), (0.8, 2), (7.0, 2)])
def test_the_part_of_a_step_that_was_over_does_not_count(over_s: float, learned: int) -> None:
    cluster = cluster_of(WorkerSpec("a", "", slots=2))
    for number in range(ENOUGH):
        epoch = f"e{number}"
        show(cluster, snapshot("full", 1, running("theirs"), step_s=1.0, epoch=epoch))
        # ``show`` receives at 1 s.
        send(cluster, request(number), now_s=1.0 + over_s)
        told = running("theirs"), running(part(number))
        show(cluster, snapshot("full", 5, *told, step_s=1.0, epoch=epoch))
        cluster.apply(Ended(token(number), Outcome.COMPLETED))
    assert under_way(cluster) == learned
