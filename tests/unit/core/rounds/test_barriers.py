"""Which group a request goes to, where several serve its model."""

from dataclasses import replace

import pytest

from router.core.events import Arrived, WorkerUp
from router.core.policies.baselines import PerRequest, least_tokens
from router.core.queue.pool import Pool
from router.core.rounds.barriers import Barrier, allot
from router.core.rounds.decider import Decider
from router.core.rounds.sharing import Sharing
from router.core.state.cluster import Cluster
from router.core.step_time import StepTime
from router.core.types import Dispatch, Request, WorkerSpec, WorkerView
from tests.support.core import request, token

COST = StepTime(5e-3, 1e-7, 0.0, 5e-5)


def view(worker_id: str, **fields: float) -> WorkerView:
    given = {"load_tokens": 1000, "requests": 2, "capacity": 6, "slots": 8, "service_rate": 0.1}
    return WorkerView(id=worker_id, **{**given, **fields})  # type: ignore[arg-type]


def barrier(
    name: str, *, cost: StepTime | None = COST, cached: int = 0, **fields: float
) -> Barrier:
    views = [view(f"{name}{number}", **fields) for number in range(2)]
    hits = (lambda _: [0, cached]) if cached else None
    return Barrier.of(views, together=True).now(cost, hits)


def chosen(one: Request, **barriers: Barrier) -> list[str]:
    """Groups that get the request; one or none."""
    found = allot([one], barriers)
    return [name for name, ids in found.items() if one.id in ids]


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        pytest.param({"service_rate": 0.05}, "a", id="half as fast"),
        pytest.param({"requests": 1}, "b", id="fewer requests, which its prompt delays"),
        pytest.param({"pending_prompt_tokens": 4000}, "a", id="prompts are pending"),
        pytest.param({"cached": 1500}, "b", id="most of its prompt is cached"),
        pytest.param({"cost": replace(COST, per_prompt_token_s=1e-4)}, "a", id="slow prompts"),
        pytest.param({"capacity": 0, "requests": 0}, "a", id="no slot"),
    ],
)
def test_a_request_goes_where_it_costs_least(other: dict[str, float], expected: str) -> None:
    one = request(1, 2000)
    assert chosen(one, a=barrier("a"), b=barrier("b", **other)) == [expected]  # type: ignore[arg-type]


def test_what_raises_the_peak_of_a_barrier_costs_all_there() -> None:
    one = request(1, 0)
    long = replace(request(2, 500), computed=True)
    level = Barrier.of([view("a0"), view("a1")], together=True).now(COST, None)
    hollow = Barrier.of([view("b0"), view("b1", load_tokens=200)], together=True).now(COST, None)
    assert chosen(long, level=level, hollow=hollow) == ["hollow"]
    assert level.cost_s(replace(one, computed=True)) == hollow.cost_s(replace(one, computed=True))


def test_an_idle_group_whose_steps_cost_nothing_without_work_takes_requests() -> None:
    free = replace(COST, base_s=0.0)
    idle = {name: barrier(name, cost=free, requests=0, load_tokens=0) for name in "ab"}
    assert chosen(request(1, 100), **idle) == ["a"]


def test_prompts_that_workers_compute_in_the_same_steps_delay_all_once() -> None:
    views, cost = [view("a0", pending_prompt_tokens=1500), view("a1")], replace(COST, per_token_s=0)
    together, alone = (Barrier.of(views, together=each).now(cost, None) for each in (True, False))
    within, beyond = request(1, 1500), request(2, 1600)
    token_s = COST.per_prompt_token_s
    # With 100 tokens more, it and the four that wait there wait for these.
    further_s = together.cost_s(beyond) - together.cost_s(within)
    assert further_s == pytest.approx(5 * 100 * token_s)
    # Where each worker steps alone, those of one wait for all of it.
    assert alone.cost_s(within) == pytest.approx(3 * 1500 * token_s + 1 / 0.1, rel=1e-2)
    idle = barrier("b", cost=cost)
    assert chosen(within, waits=together, idle=idle) == ["waits"]
    assert (together.pending_tokens, together.peak_pending) == ([1500, 1500], 1500)
    assert chosen(beyond, waits=together, idle=idle) == ["idle"], "both workers have a prompt"
    assert (idle.pending_tokens, idle.peak_pending) == ([0, 1600], 1600)


def test_while_costs_are_unknown_the_emptier_group_has_it() -> None:
    known, unknown = barrier("a", requests=4), barrier("b", cost=None)
    assert chosen(request(1, 2000), a=known, b=unknown) == ["b"]
    slow = barrier("c", cost=None, service_rate=0.02)
    assert chosen(request(1, 2000), a=known, c=slow) == ["a"]


def test_each_request_finds_those_before_it() -> None:
    barriers = {name: barrier(name, requests=0, load_tokens=0) for name in "ab"}
    found = allot([request(number, 1000) for number in range(8)], barriers)
    assert [len(ids) for ids in found.values()] == [4, 4]
    full = {name: barrier(name, capacity=1) for name in "ab"}
    assert sum(map(len, allot(map(request, range(9)), full).values())) == 4, "two workers each"


def test_without_a_barrier_only_those_on_its_worker_wait_for_a_prompt() -> None:
    views = [view(f"a{number}") for number in range(8)]
    together, alone = (Barrier.of(views, together=each).now(COST, None) for each in (True, False))
    assert chosen(request(1, 2000), together=together, alone=alone) == ["alone"]


def test_a_group_whose_memory_is_short_has_it_only_if_all_are() -> None:
    one = request(1, 2000)
    short = barrier("a", requests=1, admissible_tokens=1999)
    assert chosen(one, a=short, b=barrier("b", admissible_tokens=2000)) == ["b"]
    short = barrier("a", requests=1, admissible_tokens=1999)
    assert chosen(one, a=short, b=barrier("b", admissible_tokens=1000)) == ["a"]


def test_it_stays_where_a_worker_is_reserved_for_it_while_it_fits_nowhere() -> None:
    one = request(1, 2000)
    for reserved, expected in ((frozenset[str](), "a"), (frozenset({one.id}), "b")):
        short = barrier("a", requests=1, admissible_tokens=1999)
        busier = replace(barrier("b", requests=3, admissible_tokens=1999), reserved=reserved)
        assert chosen(one, a=short, b=busier) == [expected]
        fits = barrier("a", requests=3, admissible_tokens=2000)
        assert chosen(one, a=fits, b=busier) == ["a"]


def test_groups_that_lack_its_model_or_failed_it_are_passed_over() -> None:
    none, a, b = frozenset[str](), frozenset({"a0", "a1"}), frozenset({"b0", "b1"})
    for lacks, avoid in ((a, none), (none, a), (a, a | b)):
        one = replace(request(1, 2000), lacks=lacks, avoid=avoid)
        assert chosen(one, a=barrier("a", requests=0), b=barrier("b")) == ["b"]
    again = replace(request(1, 2000), avoid=a | b)
    assert chosen(again, a=barrier("a", requests=0), b=barrier("b")) == ["a"]
    nowhere = replace(request(1, 2000), lacks=a | b)
    assert chosen(nowhere, a=barrier("a"), b=barrier("b")) == []


# rounds


class Two:
    """Two groups with one pool: a has two slots, b one."""

    def __init__(self) -> None:
        specs = [WorkerSpec("a", "", "a", slots=2), WorkerSpec("b", "", "b", slots=1)]
        self.cluster, pool = Cluster(specs, step_time=COST), Pool(100, 5.0)
        for worker in "ab":
            self.cluster.apply(WorkerUp(worker))
        groups = self.cluster.groups
        groups["a"].line.merge(groups["b"].line)
        rule = PerRequest(least_tokens)
        self.deciders = [Decider(groups[name], pool, rule, rule, Dispatch.POOL) for name in "ab"]
        sharing = Sharing(self.deciders)
        for decider in self.deciders:
            decider.sharing = sharing
        self.pool = pool

    def arrive(self, *requests: Request) -> None:
        for one in requests:
            self.cluster.apply(Arrived(replace(one, group="a")))
            self.pool.add(one)

    def sent(self) -> list[list[tuple[str, str]]]:
        return [
            [(one, worker) for one, worker in each.decide(1.0, lambda: 1.0)]
            for each in self.deciders
        ]


def test_with_room_for_all_each_group_has_its_own() -> None:
    two = Two()
    two.arrive(request(1, 100), request(2, 100))
    first, second = two.sent()
    assert len(first) == len(second) == 1
    assert {one for one, _ in first + second} == {token(1), token(2)}
    assert [each.waiting for each in two.deciders] == [2, 0], "counted once"
    assert two.deciders[1].askable == {"a", "b"}
    assert [group.line.waiting for group in two.cluster.groups.values()] == [2, 2]


def test_with_room_for_some_each_group_chooses_from_all() -> None:
    two = Two()
    two.arrive(*(request(number, 100) for number in range(4)))
    assert [len(each) for each in two.sent()] == [2, 1]


def test_a_group_without_a_request_of_its_own_sends_nothing() -> None:
    two = Two()
    two.arrive(request(1, 100))
    assert sorted(map(len, two.sent())) == [0, 1]
