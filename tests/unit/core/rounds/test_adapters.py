"""Requests of LoRA adapters, where a worker runs only so many adapters at once."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from msgspec import structs

from router.core.events import Arrived, Dispatched, Ended, WorkerDown, WorkerUp
from router.core.policies.baselines import PerRequest, fcfs, least_tokens
from router.core.policies.bfio.policy import BfIo
from router.core.policies.policy_protocol import Policy
from router.core.queue.pool import Pool
from router.core.queue.tier import Tier
from router.core.rounds.assignment import assign, receive, short_of_places
from router.core.rounds.barriers import Barrier, allot
from router.core.rounds.decider import Decider
from router.core.state.cluster import Cluster
from router.core.types import Dispatch, Outcome, Request, WorkerSpec, WorkerView
from tests.support.clusters import show
from tests.support.core import request, snapshot, token


def of(adapter: str, number: int, arrival: float = 0.0, **fields: object) -> Request:
    return replace(request(number, 10, arrival=arrival), adapter=adapter, **fields)  # type: ignore[arg-type]


def worker(name: str, adapters: str, places: int = 1, **fields: object) -> WorkerView:
    """``adapters``: a letter for each request that it has."""
    view = WorkerView(name, 0, len(adapters), 9, max_loras=places, adapters=Counter(adapters))
    return structs.replace(view, **fields)


@pytest.mark.parametrize(
    ("runs", "places", "adapter", "has"),
    [
        ("xxy", 2, "z", False),
        ("xxy", 2, "x", True),
        ("xxy", 2, "", True),
        ("xxy", 3, "z", True),
        ("xxy", 0, "z", True),
    ],
)
def test_who_has_a_place(runs: str, places: int, adapter: str, has: bool) -> None:
    view = worker("a", runs, places)
    assert view.has_place(adapter) is has
    assert view.takes(of(adapter, 1)) is has
    assert not structs.replace(view, capacity=0).takes(of(adapter, 1))


def test_a_request_on_its_way_has_its_place() -> None:
    view = receive(worker("a", "x", 2), [of("y", 1), of("y", 2), of("", 3)])
    assert view.adapters == {"x": 1, "y": 2}
    assert not view.has_place("z")
    assert receive(worker("a", "", 0), [of("y", 1)]).adapters == {}


def test_whether_places_may_be_short() -> None:
    workers = [worker("a", "xy", 2), worker("b", "", 0)]
    assert not short_of_places(workers, set())
    assert not short_of_places(workers, {"x"})
    assert short_of_places(workers, {"x", "z"})
    assert not short_of_places(workers[1:], {"x", "y", "z"})


def entered(
    waiting: Sequence[Request],
    workers: Sequence[WorkerView],
    *,
    late_since: float = -math.inf,
    askable: str = "abc",
    policy: Policy | None = None,
) -> dict[int, str]:
    """Workers of those that enter, by number."""
    pool = Pool(100)
    for one in waiting:
        pool.add(one)
    tiers = pool.tiers(0.0, 100, 0, by_adapter=True)
    policy = policy or PerRequest(least_tokens)
    done = assign(policy, tiers, workers, askable=set(askable), late_since=late_since)
    return {int(each.request_id.removeprefix("es-"), 16): each.worker_id for each in done}


@pytest.mark.parametrize("policy", [PerRequest(least_tokens), BfIo(0.1)])
def test_a_further_adapter_goes_where_it_has_a_place(policy: Policy) -> None:
    workers = [worker("a", "x"), worker("b", "yyyyy", load_tokens=900)]
    waiting = [of("y", 1), of("x", 2), of("z", 3), of("", 4)]
    found = entered(waiting, workers, policy=policy)
    assert found == {1: "b", 2: "a", 4: found[4]}


def test_a_place_that_is_taken_in_a_round_counts_in_it() -> None:
    workers = [worker("a", ""), worker("b", "")]
    waiting = [of(name, i) for i, name in enumerate("xyzxyz")]
    assert entered(waiting, workers, policy=PerRequest(fcfs)) == {0: "a", 3: "a", 1: "b", 4: "b"}


def test_it_goes_nowhere_where_its_model_is_not_served() -> None:
    workers = [worker("a", ""), worker("b", "x")]
    assert entered([of("y", 1, lacks=frozenset("a"))], workers) == {}
    assert entered([of("y", 1, avoid=frozenset("a"))], workers) == {}


def test_nobody_joins_the_adapter_with_the_fewest_once_another_is_late() -> None:
    workers = [worker("a", "xx"), worker("b", "yyy")]
    late = [of("z", 1, arrival=-9.0)]
    others = [of("x", 2, 1.0), of("y", 3, 1.0), of("", 4, 1.0), of("w", 5, -9.0)]
    assert entered([*late, *others], workers) == {2: "a", 3: "b", 4: "a"}
    assert entered([*late, *others], workers, late_since=0.0) == {3: "b", 4: "a"}
    # Of a worker that takes no requests no place is emptied in vain.
    assert entered([*late, *others[:2]], workers, late_since=0.0, askable="b") == {2: "a"}
    none_asked = entered([*late, *others], workers, late_since=0.0, askable="")
    assert none_asked == {2: "a", 3: "b", 4: "a"}
    # Nor of one that does not serve the model.
    only_b = [replace(late[0], lacks=frozenset("a")), *others[:2]]
    assert entered(only_b, workers, late_since=0.0) == {2: "a"}


def test_memory_is_kept_for_one_request_of_a_late_tier() -> None:
    limited = {"admissible_tokens": 15, "capacity": 5}
    waiting = [of("x", 1, arrival=-9.0), of("x", 2, arrival=-9.0), of("y", 3, arrival=-9.0)]
    found = entered(waiting, [worker("a", "x", **limited)], late_since=0.0)
    assert found == {1: "a"}
    tier = Tier.of(waiting[:1], adapter="x")
    done = assign(PerRequest(fcfs), [tier], [worker("a", "x", **limited)], late_since=0.0)
    assert [each.worker_id for each in done] == ["a"]


def test_of_several_groups_one_with_a_place_gets_it() -> None:
    groups: Mapping[str, Barrier] = {
        name: Barrier.of([worker(name, runs, slots=8, requests=count)], together=True)
        for name, runs, count in (("a", "x", 1), ("b", "y", 5))
    }
    assert allot([of("y", 1)], groups) == {"a": set(), "b": {token(1)}}
    assert allot([of("x", 1)], groups) == {"a": {token(1)}, "b": set()}


# live workers


class Life:
    """Two workers, each with one place for adapters."""

    def __init__(self, starvation: float = 50.0) -> None:
        self.cluster = Cluster(WorkerSpec(i, i, slots=4) for i in "ab")
        for i in "ab":
            self.cluster.apply(WorkerUp(i))
            told = structs.replace(snapshot("full", 1), max_loras=1)
            show(self.cluster, told, worker_id=i)
        self.group = self.cluster.groups["default"]
        self.pool = Pool(100, starvation)
        parts = self.group, self.pool, BfIo(0.1), PerRequest(fcfs), Dispatch.POOL
        self.decider = Decider(*parts)
        self.number = 0

    def come(self, adapter: str, now: float) -> int:
        self.number += 1
        one = of(adapter, self.number, now)
        self.cluster.apply(Arrived(one))
        self.pool.add(one)
        return self.number

    def decide(self, now: float) -> dict[int, str]:
        done = {}
        for request_id, worker_id in self.decider.decide(now, lambda: now):
            self.pool.remove(request_id)
            self.cluster.apply(Dispatched(request_id, worker_id, now))
            done[int(request_id.removeprefix("es-"), 16)] = worker_id
        return done

    def end(self, number: int) -> None:
        self.cluster.apply(Ended(token(number), Outcome.COMPLETED))


def test_a_worker_counts_the_adapters_of_requests_in_flight() -> None:
    life = Life()
    assert life.come("x", 0.0) in life.decide(0.0)
    (shown,) = [each for each in life.group.views(Dispatch.POOL) if each.requests]
    assert (shown.max_loras, shown.adapters) == (1, {"x": 1})
    (at_once,) = [each for each in life.group.views(Dispatch.INSTANT) if each.requests]
    assert (at_once.max_loras, at_once.adapters) == (0, {})
    life.end(1)
    assert all(each.adapters == {} for each in life.group.views(Dispatch.POOL))
    life.cluster.apply(WorkerDown("a", "gone"))
    life.cluster.apply(WorkerUp("a"))
    assert sorted(each.max_loras for each in life.group.views(Dispatch.POOL)) == [0, 1]


def test_it_waits_for_an_end_and_only_then_enters() -> None:
    life = Life()
    for name in "xy":
        life.come(name, 0.0)
    first = life.decide(0.0)
    assert sorted(first.values()) == ["a", "b"]
    life.come("z", 1.0)
    life.come("x", 1.0)
    life.come("", 1.0)
    assert life.decide(1.0).keys() == {4, 5}
    assert life.pool.adapters == {"z": 1}
    life.end(2)
    assert life.decide(2.0) == {3: first[2]}
    assert life.pool.adapters == {}


def test_the_tiers_of_a_policy_are_split_only_where_places_are_short() -> None:
    life, asked = Life(), []
    inner = life.decider.policy.assign

    def noted(waiting: Sequence[Request], *rest: object) -> object:
        asked.append(sorted({one.adapter for one in waiting}))
        return inner(waiting, *rest)  # type: ignore[arg-type]

    life.decider.policy.assign = noted  # type: ignore[method-assign, assignment]
    for name in ("x", "", "x"):
        life.come(name, 0.0)
    life.decide(0.0)
    assert asked == [["", "x"]]
    life.come("y", 1.0)
    life.come("", 1.0)
    life.decide(1.0)
    assert ["", "y"] not in asked[1:]


@pytest.mark.parametrize("starvation", [50.0, float("inf")])
def test_a_stream_of_other_adapters_keeps_nobody_waiting_for_ever(starvation: float) -> None:
    """There are always more of them; without a bound on waiting it would wait."""
    life, under_way = Life(starvation), dict[int, float]()
    waits: float | None = None
    for now in map(float, range(400)):
        for number in [i for i, ends in under_way.items() if ends <= now]:
            del under_way[number]
            life.end(number)
        if now == 30:
            wanted = life.come("z", now)
        while len(life.pool) < 6:
            life.come("xy"[life.number % 2], now)
        entering = life.decide(now)
        under_way |= {number: now + 8 + number % 5 for number in entering}
        if now >= 30 and wanted in entering:
            waits = now - 30
    assert waits is None if starvation == float("inf") else (waits is not None and waits < 150)
