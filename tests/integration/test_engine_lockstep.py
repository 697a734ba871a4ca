"""Two real vLLM ranks of a mixture of experts that step together, behind the router and alone.

For correctness and counters: two cores and a tiny random model say nothing of latencies.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.barrier_accounts import Accounts
from tests.support.engine import Installation
from tests.support.moe_lockstep.ranks import (
    RANKS,
    SLOTS,
    Group,
    moe_installation,
    running_ranks,
)
from tests.support.moe_lockstep.runs import (
    Trial,
    both,
    heavy_beside_light,
    outputs,
    overtakings,
    replay,
    routing,
    states,
    workers,
)
from tests.support.server import Server, wait_until

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
    """Every request was answered in full, every token computed once, and the ranks kept step."""
    report, steps = trial.report, [list(rank.values()) for rank in trial.ranks]
    assert (report["completed"], report["failed"], report["errors"]) == (REQUESTS, 0, {})
    # The last token of an output is never computed upon.
    tokens = report["total_input_tokens"] + report["total_output_tokens"] - REQUESTS
    assert sum(step.tokens for rank in steps for step in rank) == tokens
    assert sum(step.entered for rank in steps for step in rank) == REQUESTS
    assert all(max(step.running for step in rank) == SLOTS for rank in steps)
    assert trial.overtakings == 0


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

    together = both(ranks)
    assert len(together) > 20
    # A prompt of 20 tokens, then one token a step, beside more than a thousand of them: yet no rank
    # ended a step before the other one had ended the step before, and both took about as long.
    assert max(light.tokens for _, light in together) <= 20
    assert overtakings(ranks) == []
    assert 1 / 2 < barrier.light_s / barrier.heavy_s < 2


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
    # There are more clients than slots.
    assert trial.report["cluster"]["whole"]["pool_waiting"]["steps"] > 0


@external
def test_without_one_rank_the_group_is_down_and_all_of_it_comes_back(
    group: Group, moe_engine: Installation, tmp_path: Path
) -> None:
    """How long the new ranks wait is known at once, since they count their steps together."""
    with routing(group, tmp_path, "--step-time", "0.01,1e-6") as router:
        replay(router.url, group, tmp_path, REQUESTS // 2, seed=1)
        before = Accounts.of(router, RANKS)
        assert before.known_s / before.worker_s > 0.95
        group.servers[1].kill()
        wait_until(lambda: in_lockstep_with_the_second(router), WAIT_S, "both are down")
        for server in group.servers:
            server.stop()
        down = Accounts.of(router, RANKS)
        again = tmp_path / "again"
        again.mkdir()
        with running_ranks(moe_engine, again, at=group) as new:
            wait_until(lambda: states(router) == [("fresh", True)] * 2, WAIT_S, "both are back")
            replay(router.url, new, again, REQUESTS // 2, seed=2)
            after = Accounts.of(router, RANKS)
    assert after.steps > down.steps + 100
    assert after.known_since(down) > 0.95


def in_lockstep_with_the_second(router: Server) -> bool:
    """The second rank is down by itself, the first one for its sake."""
    first, second = workers(router)
    why = f"in lockstep with {second['id']}: {second['down_reason']}"
    return not (first["up"] or second["up"]) and first["down_reason"] == why
