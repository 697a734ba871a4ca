"""Which requests are sent where prompts are computed on the workers, and which wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from router.core.errors import PolicyError
from router.core.forecast.forecast import Outlook, WorkProfile
from router.core.policies.bfio.policy import BfIo
from router.core.policies.policy_protocol import Known
from router.core.queue.tier import Tier
from router.core.rounds import assignment as rounds
from router.core.rounds.checks import check
from router.core.step_time import StepTime
from router.core.types import Assignment, Request, WorkerView
from tests.support.core import pairs, request, requests, views

CHUNK = 1000
COST = StepTime(5e-3, 1e-7, 0.0, 1e-5)


def workers(*pending: int, capacity: int = 8, loads: Sequence[int] = ()) -> list[WorkerView]:
    """Workers a, b, c … with these prompt tokens to compute; all hold as much KV."""
    some = views(loads or [50_000] * len(pending), capacity, [1] * len(pending))
    return [
        msgspec.structs.replace(one, pending_prompt_tokens=tokens)
        for one, tokens in zip(some, pending, strict=True)
    ]


def known(
    these: Sequence[WorkerView], hits: Mapping[int, Sequence[int]] | None = None, **facts: Any
) -> Known:
    """``hits``: cached tokens by worker, by the request's index; nothing of the others."""
    by_id = {request(i).id: found for i, found in (hits or {}).items()}
    loads = np.array([[one.load_tokens] for one in these], dtype=np.float64)
    profile = WorkProfile(prefill_beta=100.0, prefill_chunk=CHUNK)
    return Known(
        Outlook(loads, profile, 1.0, 0.1),
        COST,
        lambda one: by_id.get(one.id, [0] * len(these)),
        **{"may_wait": True, **facts},
    )


def sent(
    waiting: Sequence[Request],
    these: Sequence[WorkerView],
    hits: Mapping[int, Sequence[int]] | None = None,
    **facts: Any,
) -> dict[int, str]:
    """Worker by the request's index in the pool; checked as in a round."""
    done = rounds.assign(BfIo(0.1), [waiting], these, known(these, hits, **facts))
    return dict(pairs(done, waiting))


def test_the_worker_with_the_least_to_compute() -> None:
    assert sent(requests([500]), workers(300, 200)) == {0: "b"}


def test_the_prefix_is_worth_a_queue() -> None:
    assert sent(requests([5000]), workers(900, 0), {0: [4800, 0]}) == {0: "a"}


def test_a_request_waits_for_the_busy_worker_with_its_prefix() -> None:
    waiting = requests([5000])
    assert sent(waiting, workers(3000, 0), {0: [4800, 0]}) == {}
    # What it would compute anew weighs three times: it delays others too.
    assert sent(waiting, workers(14_300, 0), {0: [4800, 0]}) == {}
    assert sent(waiting, workers(14_500, 0), {0: [4800, 0]}) == {0: "b"}


def test_where_requests_may_not_wait_they_queue_there() -> None:
    found = {0: [4800, 0]}
    assert sent(requests([5000]), workers(3000, 0), found, may_wait=False) == {0: "a"}


def test_where_requests_may_not_wait_all_are_sent_for_whom_there_is_a_slot() -> None:
    several = requests([500] * 200)
    assert len(sent(several, workers(0, 0, capacity=90), may_wait=False)) == 180
    assert len(sent(several, workers(0, 0, capacity=101), may_wait=False)) == 200


def test_where_requests_may_not_wait_only_those_with_memory_somewhere_are_planned() -> None:
    asked = list[str]()

    def hits(one: Request) -> list[int]:
        asked.append(one.id)
        return [0, 0]

    full = [msgspec.structs.replace(one, admissible_tokens=100) for one in workers(0, 0)]
    waiting = [*requests([500] * 200), request(200, 80)]
    facts = replace(known(full, may_wait=False), hits=hits)
    assert list(rounds.assign(BfIo(0.1), [waiting], full, facts)) == [(request(200).id, "a")]
    assert set(asked) == {request(200).id}


def test_all_are_sent_while_no_worker_is_busy_however_many_they_are() -> None:
    assert len(sent(requests([10] * 100), workers(0, 0, capacity=90))) == 100


@pytest.mark.parametrize("older", [500, 80])
def test_who_fits_is_sent_however_many_before_it_do_not(older: int) -> None:
    """From 80 tokens on one fits each worker, and then a smaller one."""
    small = [msgspec.structs.replace(one, admissible_tokens=100) for one in workers(0, 0)]
    found = sent(requests([*[older] * 150, 20]), small)
    assert set(found) == {150} | ({0, 1} if older == 80 else set())


def test_a_worker_gets_what_its_next_step_computes() -> None:
    assert sent(requests([600, 600, 600]), workers(0, 5000)) == {0: "a", 1: "a"}


def test_short_prompts_go_first() -> None:
    assert sent(requests([5000, 2000, 800]), workers(900)[:1] + workers(0, 9000)[1:]) == {2: "a"}


def test_who_has_waited_goes_before_shorter_ones() -> None:
    old, young = request(0, 5000, arrival=0.0), request(1, 800, arrival=9.9)
    these = workers(900, 90_000)
    assert sent([old, young], these, now_s=10.0) == {0: "a"}
    assert sent([replace(old, arrival_s=9.9), young], these, now_s=10.0) == {1: "a"}


def test_loads_above_the_fullest_count_for_the_steps_that_they_last() -> None:
    # b has 10 tokens less to compute, 1,000 tokens' worth; there 400 more would lead for 50 steps.
    these = workers(110, 100, loads=[50_000, 60_000])
    assert sent(requests([400]), these) == {0: "a"}
    assert sent(requests([400]), workers(110, 100, loads=[50_000, 50_000])) == {0: "b"}


def test_a_full_worker_sends_the_others_on() -> None:
    these = workers(0, 100, capacity=1)
    assert sent(requests([100, 100, 100]), these, {0: [99, 0], 1: [99, 0]}) == {0: "a", 1: "b"}


def test_a_worker_without_memory_is_not_waited_for() -> None:
    short = msgspec.structs.replace(workers(0)[0], admissible_tokens=400)
    other = workers(0, 900)[1]
    assert sent(requests([500]), [short, other], {0: [499, 0]}) == {0: "b"}


def test_memory_that_the_plan_uses_up_is_not_given_twice() -> None:
    short = msgspec.structs.replace(workers(0)[0], admissible_tokens=500)
    other = workers(0, 900)[1]
    assert sent(requests([300, 300]), [short, other]) == {0: "a", 1: "b"}


def test_several_answers_count_as_often() -> None:
    wide = request(0, 400, slots=3)
    assert sent([wide, request(1, 100)], workers(0, 1100)) == {0: "a", 1: "a"}


@pytest.mark.parametrize(
    "cost", [None, StepTime(5e-3, 1e-7), StepTime(5e-3, 1e-7, 0.0, 1e-9), StepTime(5e-3)]
)
def test_who_has_waited_goes_first_whatever_is_known_of_costs(cost: StepTime | None) -> None:
    these, fresh = workers(0, 5000), [request(i, 300, arrival=60.0) for i in range(1, 13)]

    def sent_of(long: Request) -> list[int]:
        waiting = [long, *fresh]
        asked = replace(known(these, now_s=60.0), step_time=cost)
        return [index for index, _ in pairs(BfIo(0.1).assign(waiting, these, asked), waiting)]

    assert sent_of(request(0, 8000)) == [0]
    assert 0 not in sent_of(request(0, 8000, arrival=60.0))


def test_where_slots_are_short_the_program_decides() -> None:
    these = workers(0, 2000, capacity=1, loads=[50_000, 40_000])
    policy, waiting = BfIo(0.1), requests([500, 10_000, 700])
    policy.assign(waiting, these, known(these, slots_first=True))
    assert policy.last is not None
    policy.assign(waiting[:1], these, known(these))
    assert policy.last is None


def test_nobody_is_held_back_where_no_worker_is_busy() -> None:
    waiting, these = requests([300, 400]), workers(0, 0)
    some = [Assignment(waiting[0].id, "a")]
    with pytest.raises(PolicyError, match="held back"):
        check(some, Tier.of(waiting), these, memory=False, busy_from=CHUNK)
    check(some, Tier.of(waiting), workers(0, CHUNK), memory=False, busy_from=CHUNK)
    check(some, Tier.of(waiting), workers(CHUNK - 300, 0), memory=False, busy_from=CHUNK)


def test_a_request_that_waits_for_its_prefix_keeps_no_worker_from_later_tiers() -> None:
    roomy = [
        msgspec.structs.replace(one, admissible_tokens=room)
        for one, room in zip(workers(3000, 0), (9000, 8000), strict=True)
    ]
    first, second = requests([5000, 400])
    done = rounds.assign(BfIo(0.1), [[first], [second]], roomy, known(roomy, {0: [4800, 0]}))
    assert done == [Assignment(second.id, "b")]
