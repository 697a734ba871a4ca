"""Rules for workers of unequal speed, by hand, and what it costs to take some as equal."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

import pytest
from msgspec.structs import replace

from router.core.policies.policy_table import POLICIES, PolicySettings
from router.core.types import Request, WorkerView
from tests.support.core import pairs, request, requests, views


def fleet(
    rates: Sequence[float],
    slots: Sequence[int],
    here: Sequence[int] = (),
    errors: Sequence[float] = (),
    room: int = 0,
) -> list[WorkerView]:
    """Workers a, b, c … with so much of their slots in use, and room for so many more."""
    here = here or [0] * len(rates)
    plain = views([0] * len(rates), [s + room - z for s, z in zip(slots, here, strict=True)], here)
    rows = zip(plain, slots, rates, errors or [0.0] * len(rates), strict=True)
    return [
        replace(view, slots=slots, service_rate=rate, rate_error=error)
        for view, slots, rate, error in rows
    ]


def choose(name: str, waiting: Sequence[Request], workers: Sequence[WorkerView]) -> str:
    """The workers that a policy gives to the requests, in order of arrival."""
    policy = POLICIES[name].make(PolicySettings())
    done = policy.assign(waiting, workers)
    return "".join(worker for _, worker in sorted(pairs(done, waiting)))


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        pytest.param(fleet([1, 3, 2], [2, 2, 2]), "bbccaa", id="the fastest is filled first"),
        pytest.param(fleet([1, 3, 2], [2, 2, 2], [0, 1, 2]), "baa", id="full ones are left out"),
        pytest.param(fleet([2, 2, 2], [2, 4, 2]), "abcbabcb", id="equals: the least occupied"),
        pytest.param(fleet([2, 1], [1, 2], room=2), "abbaabb", id="a free slot before a queue"),
        pytest.param(
            fleet([2.0, 1.95, 1.0], [2, 2, 2], errors=[0.03, 0.03, 0.03]), "ababcc", id="noise"
        ),
        pytest.param(
            fleet([2.0, 1.8, 1.0], [2, 2, 2], errors=[0.03, 0.03, 0.03]), "aabbcc", id="no noise"
        ),
        pytest.param(
            fleet([2.0, 1.9, 1.0], [2, 2, 2], errors=[0, 0.06, 0.03]), "ababcc", id="its own noise"
        ),
    ],
)
def test_jffc(workers: list[WorkerView], expected: str) -> None:
    assert choose("jffc", requests([5] * 8), workers) == expected


def test_a_request_of_several_slots_goes_where_all_of_it_runs() -> None:
    wide = [request(1, slots=2)]
    assert choose("jffc", wide, fleet([3, 1], [2, 2], [1, 0])) == "b"
    assert choose("jffc", wide, fleet([3, 1], [2, 2], [1, 1])) == "a", "nowhere: where some can"
    queueing = fleet([1, 0.8], [2, 4], [1, 0], room=9)
    assert choose("sed", [request(1, slots=3)], queueing) == "b", "two of three wait at a"


@pytest.mark.parametrize(
    ("name", "workers", "expected"),
    [
        # 1, 1, 1.5 and 2 against 1 / 0.4; then 2.5 on both, of which one is idle.
        pytest.param("sed", fleet([1, 0.4], [2, 2], room=9), "aaaabbaa", id="sed"),
        pytest.param("sed", fleet([1, 1], [1, 2], room=9), "abbbabba", id="sed, equal rates"),
        # Nobody ahead anywhere: the fastest; then one ahead, and so on.
        pytest.param("sa_jsq", fleet([1, 3], [2, 1], room=9), "baababab", id="sa_jsq"),
    ],
)
def test_rules_that_let_requests_queue(name: str, workers: list[WorkerView], expected: str) -> None:
    assert choose(name, requests([5] * 8), workers) == expected


def test_jiq_draws_among_those_with_a_free_slot() -> None:
    workers = fleet([1, 9, 1], [50, 50, 50], [0, 50, 0], room=200)
    drawn = choose("jiq", requests([5] * 100), workers)
    assert set(drawn) == {"a", "c"}
    assert "b" in choose("jiq", requests([5] * 200), workers), "nobody has one"


def mean_response_s(rates: Sequence[float], error: float, load: float) -> float:
    """Of 1,200 exponential requests at workers of four slots, from a pool, by ``jffc``."""
    rng = random.Random(7)
    policy = POLICIES["jffc"].make(PolicySettings())
    slots, ids = [4] * len(rates), {view.id: at for at, view in enumerate(views([0] * len(rates)))}
    here, ends = [0] * len(rates), list[tuple[float, int]]()
    queue, total_s, come_s = deque[tuple[float, float]](), 0.0, 0.0
    for _ in range(1200):
        come_s += rng.expovariate(load * 4 * sum(rates))
        arrival, now_s = (come_s, rng.expovariate(1)), 0.0
        while now_s < come_s:
            now_s, worker = heappop(ends) if ends and ends[0][0] < come_s else (come_s, -1)
            if worker >= 0:
                here[worker] -= 1
            else:
                queue.append(arrival)
            if queue and min(here) < 4:
                seen = fleet(rates, slots, here, [error] * len(rates))
                chosen = ids[policy.assign([request(1)], seen)[0].worker_id]
                since_s, work = queue.popleft()
                here[chosen] += 1
                heappush(ends, (now_s + work / rates[chosen], chosen))
                total_s += now_s - since_s + work / rates[chosen]
    return total_s / 1200


@pytest.mark.parametrize("load", [0.3, 0.6, 0.9])
def test_who_cannot_be_told_apart_costs_no_more_than_they_differ(load: float) -> None:
    rates = [1.0, 0.97, 0.5, 0.485]
    strict = mean_response_s(rates, 0.0, load)
    assert mean_response_s(rates, 0.032, load) == pytest.approx(strict, rel=0.015)
    assert mean_response_s([1, 1, 0.5, 0.5], 0.032, load) == pytest.approx(
        mean_response_s([1, 1, 0.5, 0.5], 0.0, load)
    )
