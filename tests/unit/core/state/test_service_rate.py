"""Rates of workers: by the plan, then by what they complete; a cluster learns them from events."""

import random
from heapq import heappop, heappush

import pytest

from router.core.events import Dispatched, Ended, Prefilled, Returned
from router.core.state.rates import EVIDENCE, MEMORY, GroupRates, ServiceRate
from router.core.types import Dispatch, Outcome, Request, WorkerSpec
from tests.support.clusters import cluster_of, send
from tests.support.core import request


def serve(
    member: ServiceRate,
    rate: float,
    completions: int,
    *,
    slots: int = 4,
    abort_share: float = 0.0,
    start_s: float = 0.0,
    seed: int = 0,
) -> float:
    """Keep all slots busy with exponential work until so many have ended; when that is."""
    rng = random.Random(seed)
    ends: list[tuple[float, bool]] = []
    now_s = start_s
    for ended in range(completions + slots):
        if ended >= slots:
            now_s, complete = heappop(ends)
            member.gone(1, now_s, complete=complete)
        if ended < completions:
            member.sent(1, slots, now_s)
            work_s = rng.expovariate(rate)
            patience_s = rng.expovariate(rate) if rng.random() < abort_share else work_s
            heappush(ends, (now_s + min(work_s, patience_s), work_s <= patience_s))
    return now_s


def test_a_plan_holds_until_something_is_completed() -> None:
    rates = GroupRates()
    fast, slow = rates.join(2.0), rates.join(0.5)
    assert (fast.per_s, slow.per_s) == (2.0, 0.5)
    assert fast.estimate()[1] == slow.estimate()[1] == 0.0
    assert fast.known_per_s == 2.0


def test_without_a_plan_nothing_is_known_and_all_are_alike() -> None:
    rates = GroupRates()
    one, other = rates.join(None), rates.join(None)
    assert (one.per_s, other.per_s, one.known_per_s) == (1.0, 1.0, None)


@pytest.mark.parametrize("planned", [None, 0.2, 4.0])
@pytest.mark.parametrize("abort_share", [0.0, 0.6])
def test_a_rate_is_learned_though_many_are_aborted(
    planned: float | None, abort_share: float
) -> None:
    member = GroupRates().join(planned)
    serve(member, 0.8, 4000, abort_share=abort_share)
    assert member.per_s == pytest.approx(0.8, rel=4 * member.estimate()[1])
    assert member.estimate()[1] < 0.035
    assert member.known_per_s == member.per_s


def test_a_rate_that_changes_is_followed() -> None:
    member = GroupRates().join(1.0)
    now_s = serve(member, 1.0, 5000)
    serve(member, 0.5, 5000, start_s=now_s)
    assert member.per_s == pytest.approx(0.5, rel=0.12)
    assert member.completions < 1.01 * MEMORY


def test_a_worker_that_completes_nothing_becomes_slower_and_slower() -> None:
    rates = GroupRates()
    stuck, sound = rates.join(1.0), rates.join(1.0)
    stuck.sent(2, 2, 0.0)
    seen = []
    for now_s in (10.0, 100.0, 1000.0):
        stuck.gone(1, now_s, complete=False)
        stuck.sent(1, 2, now_s)
        seen.append(stuck.per_s)
    assert 1.0 > seen[0] > seen[1] > seen[2] > 0
    assert sound.per_s > seen[2]


def test_who_queues_in_the_engine_uses_no_slot() -> None:
    member = GroupRates().join(1.0)
    member.sent(50, 4, 0.0)
    member.gone(50, 2.0, complete=True)
    assert member.busy_s == pytest.approx(8.0, rel=0.06)


def test_a_plan_that_is_wrong_for_all_ranks_those_that_are_still_unknown() -> None:
    rates = GroupRates()
    tried, untried = rates.join(10.0), rates.join(5.0)
    serve(tried, 1.0, 2000)
    assert tried.per_s == pytest.approx(1.0, rel=0.15)
    assert untried.per_s == pytest.approx(0.5, rel=0.15)


def test_a_new_worker_is_expected_to_be_like_the_others() -> None:
    rates = GroupRates()
    serve(rates.join(None), 0.5, 2000, seed=1)
    serve(rates.join(None), 0.1, 400, seed=2)
    newcomer = rates.join(None)
    assert 0.1 < newcomer.per_s < 0.5
    assert newcomer.estimate()[1] == 0.0


def test_one_without_a_plan_among_others_is_expected_to_be_like_their_mean() -> None:
    rates = GroupRates()
    rates.join(3.0)
    planned, newcomer = rates.join(1.0), rates.join(None)
    assert newcomer.per_s == 2.0
    rates.amend(planned, 5.0)
    assert (planned.per_s, newcomer.per_s) == (5.0, 4.0)
    rates.leave(planned)
    assert newcomer.per_s == 3.0


def test_what_a_worker_has_taught_goes_with_it() -> None:
    rates = GroupRates()
    gone, left = rates.join(1.0), rates.join(1.0)
    serve(gone, 0.1, 500)
    assert left.per_s < 0.2
    rates.leave(gone)
    assert left.per_s == 1.0


def test_nothing_is_learned_where_nobody_tells_the_time() -> None:
    member = GroupRates().join(2.0)
    member.sent(3, 4, None)
    member.gone(1, None, complete=True)
    member.gone(1, 7.0, complete=False)
    assert (member.per_s, member.busy_s, member.completions) == (2.0, 0.0, 0.0)
    member.gone(1, 9.0, complete=True)
    assert member.busy_s == pytest.approx(2.0, rel=0.01)


def test_a_cluster_learns_from_what_is_sent_and_what_ends() -> None:
    cluster = cluster_of(WorkerSpec("a", "", slots=2, service_rate=3.0), WorkerSpec("b", ""))
    a, b = cluster.worker("a"), cluster.worker("b")
    views = cluster.groups["default"].views(Dispatch.POOL)
    assert [(view.slots, view.service_rate) for view in views] == [(2, 3.0), (256, 3.0)]

    send(cluster, request(1, slots=2), now_s=1.0)
    cluster.apply(Ended(request(1).id, Outcome.COMPLETED, 3.0))
    assert a.service.busy_s == pytest.approx(4.0, rel=0.01)
    send(cluster, request(2), now_s=3.0)
    cluster.apply(Returned(request(2).id, again := request(2).again(), 4.0))
    assert a.service.busy_s == pytest.approx(5.0, rel=0.01)
    cluster.apply(Dispatched(again.id, "b", 4.0))
    cluster.apply(Ended(again.id, Outcome.ABORTED, 9.0))
    assert (b.service.busy_s, b.service.completions) == (5.0, 0.0)
    view = cluster.groups["default"].views(Dispatch.POOL)[0]
    assert (view.service_rate, view.rate_error) == a.service.estimate()
    assert view.rate_error == pytest.approx(2**0.5 / (EVIDENCE + 2), rel=0.01)

    cluster.amend(WorkerSpec("a", "", slots=2, service_rate=9.0))
    assert (a.service.planned, b.service.expected) == (9.0, 9.0)
    cluster.leave("a")
    assert b.service.expected == 1.0


def test_an_error_that_comes_at_once_makes_no_worker_fast() -> None:
    cluster = cluster_of(WorkerSpec("a", "", service_rate=1.0), WorkerSpec("b", ""))
    a = cluster.worker("a")
    for number in range(100):
        send(cluster, request(number), now_s=float(number))
        a.refused(request(number).id)
        cluster.apply(Ended(request(number).id, Outcome.COMPLETED, number + 0.01))
    a.refused("es-99")  # it is gone
    assert a.service.completions == 0.0
    assert a.service.busy_s == pytest.approx(1.0)
    assert a.service.per_s < 1.0


def test_a_prefill_worker_is_learned_of_prompts() -> None:
    cluster = cluster_of(
        WorkerSpec("d", ""), WorkerSpec("p", "", role="prefill", slots=4, service_rate=2.0)
    )
    prompt = Request("es-1", "default/prefill", 50, slots=3)
    send(cluster, prompt, "p", now_s=0.0)
    ready = Request("es-1r1", "default", 50, slots=3)
    cluster.apply(Prefilled(prompt.id, ready, None, 0.5))
    service = cluster.worker("p").service
    assert service.completions == 1
    assert service.busy_s == pytest.approx(0.5, rel=0.01)
