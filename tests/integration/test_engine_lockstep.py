"""Two real vLLM ranks of a mixture of experts that step together, behind the router and alone.

For correctness and counters: two cores and a tiny random model say nothing of latencies.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engine import Installation
from tests.support.moe_lockstep.ranks import SLOTS, Group, moe_installation, running_ranks
from tests.support.moe_lockstep.runs import (
    CLIENTS,
    Trial,
    heavy_beside_light,
    outputs,
    overtakings,
    replay,
    routing,
    states,
)
from tests.support.server import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]

REQUESTS = 120
WAIT_S = 60

external = pytest.mark.parametrize("group", ["external"], indirect=True)
internal = pytest.mark.parametrize("group", ["internal"], indirect=True)
Outputs = list[list[int]]


@pytest.fixture(scope="module")
def moe_engine(
    engine_installation: Installation, tmp_path_factory: pytest.TempPathFactory
) -> Installation:
    return moe_installation(engine_installation, tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module")
def group(
    request: pytest.FixtureRequest,
    moe_engine: Installation,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Group]:
    """External: a server for each rank. Internal: one server, vLLM balances."""
    folder = tmp_path_factory.mktemp(request.param)
    with running_ranks(moe_engine, folder, balancer=request.param == "internal") as group:
        yield group


@pytest.fixture(scope="module")
def answers() -> dict[str, Outputs]:
    """Outputs by the place where they were made."""
    return {}


def check(trial: Trial) -> None:
    """Every request was answered in full, and the ranks kept step."""
    assert (trial.report["completed"], trial.report["failed"]) == (REQUESTS, 0)
    assert trial.report["errors"] == {}
    assert trial.overtakings == 0
    figures = trial.figures
    assert figures.steps > 0
    assert 0 < figures.imbalance_tokens <= figures.max_load_tokens
    assert figures.slot_bubble_steps >= 0


@internal
def test_vllms_own_balancer(group: Group, tmp_path: Path) -> None:
    (server,) = group.servers
    check(replay(server.url, group, tmp_path, REQUESTS, seed=1))


@internal
def test_outputs_of_internal_ranks(
    group: Group, answers: dict[str, Outputs], tmp_path: Path
) -> None:
    (server,) = group.servers
    answers["balancer"] = outputs(server.url)
    for rank in "01":
        answers[f"internal {rank}"] = outputs(server.url, {"X-data-parallel-rank": rank})
    with routing(group, tmp_path) as router:
        answers["router to internal"] = outputs(router.url)
    same(answers)


@external
def test_outputs_of_external_ranks(
    group: Group, answers: dict[str, Outputs], tmp_path: Path
) -> None:
    for rank, server in enumerate(group.servers):
        answers[f"external {rank}"] = outputs(server.url)
    with routing(group, tmp_path) as router:
        answers["router to external"] = outputs(router.url)
    same(answers)


def same(answers: dict[str, Outputs]) -> None:
    first = next(iter(answers.values()))
    assert [len(tokens) for tokens in first] == [40, 40, 40]
    assert {place: made for place, made in answers.items() if made != first} == {}


@external
def test_a_light_rank_waits_for_a_heavy_one(group: Group) -> None:
    ranks, barrier = heavy_beside_light(group)

    assert overtakings(ranks) == []
    assert barrier.steps > 20
    # Both count the same steps between the same two moments.
    assert barrier.light_s == pytest.approx(barrier.heavy_s, rel=0.3)
    assert barrier.light_s > 1.3 * barrier.alone_s


@external
@pytest.mark.parametrize(
    "flags",
    [
        ("--policy", "jsq", "--overcommit", "0"),
        ("--policy", "least_tokens", "--overcommit", "0"),
        ("--policy", "bfio", "--overcommit", "0"),
        ("--policy", "bfio", "--overcommit", "2"),
    ],
    ids=" ".join,
)
def test_a_trace_through_the_router(group: Group, flags: tuple[str, ...], tmp_path: Path) -> None:
    with routing(group, tmp_path, *flags) as router:
        trial = replay(router.url, group, tmp_path, REQUESTS, seed=1)
    check(trial)
    assert trial.report["cluster"]["whole"]["steps"] > 0
    assert CLIENTS > 2 * SLOTS


@external
def test_without_one_rank_the_group_is_down(group: Group, tmp_path: Path) -> None:
    with routing(group, tmp_path) as router:
        group.servers[1].kill()
        wait_until(lambda: [up for _, up in states(router)] == [False] * 2, WAIT_S, "both are down")
