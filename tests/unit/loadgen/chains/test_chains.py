"""Chains in virtual time, against queues whose means are known."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from loadgen.chains import chain_simulation
from loadgen.chains.chain_simulation import simulate_chains
from loadgen.chains.chains_config import ChainsOptions
from loadgen.chains.chains_results import compare
from loadgen.chains.routing import simulate_routing
from loadgen.chains.scenario import BLOOM_176B, LLAMA_2_7B
from loadgen.chains.work import Arrivals, Measured, Served, Service, Work, draw_work
from loadgen.report.intervals import estimate
from loadgen.traces.trace import Trace
from loadgen.traces.trace_files import TraceRequest
from router.core.errors import ConfigError
from router.core.placement.exact_response import exact_response_s
from router.core.placement.model import Chain, Placement
from router.core.policies.policy_table import POLICIES
from router.core.types import Dispatch


def chain(service_s: float, slots: int, server: int = 0) -> Chain:
    return Chain((server,), (1,), service_s, slots)


def assert_mean(
    expected_s: float,
    chains: Sequence[Chain],
    rate: float,
    policy: str = "jffc",
    dispatch: Dispatch = Dispatch.POOL,
) -> None:
    """The mean response time is that, by an interval of 95 % at most 5 % wide on either side."""
    means = [
        simulate_chains(chains, policy, draw_work(rate, 25_000, seed), dispatch)
        .after(2_000)
        .response_s.mean()
        for seed in range(6)
    ]
    found = estimate(means)
    assert found.half_width is not None
    assert found.half_width < 0.05 * expected_s
    assert abs(found.mean - expected_s) < found.half_width


def erlang_c_s(service_s: float, slots: int, rate: float) -> float:
    """Mean response time of M/M/c."""
    offered = rate * service_s
    terms = [offered**n / math.factorial(n) for n in range(slots + 1)]
    queued = terms[-1] * slots / (slots - offered)
    waits = queued / (sum(terms[:-1]) + queued)
    return service_s + waits * service_s / (slots - offered)


@pytest.mark.parametrize(("slots", "load"), [(1, 0.5), (5, 0.8), (40, 0.9)])
def test_one_chain_is_an_m_m_c_queue(slots: int, load: float) -> None:
    rate = load * slots / 2.0

    assert_mean(erlang_c_s(2.0, slots, rate), [chain(2.0, slots)], rate)


@pytest.mark.parametrize("dispatch", Dispatch)
def test_who_has_just_left_is_seen_no_more(dispatch: Dispatch) -> None:
    work = Work(np.array([0.0, 1.0]), np.array([1.0, 1.0]))
    served = simulate_chains([chain(1.0, 1), chain(9.0, 1)], "jsq", work, dispatch)
    assert served.response_s.tolist() == [1.0, 1.0]


def test_at_once_and_by_chance_each_chain_is_a_queue_of_its_own() -> None:
    twice = [chain(1, 2), chain(1, 2)]

    assert_mean(erlang_c_s(1, 2, 1.2), twice, 2.4, "random", Dispatch.INSTANT)


def test_two_speeds_are_the_exact_chain() -> None:
    exact_s = exact_response_s([1, 0.5], [3, 4], 3.5)

    assert exact_s is not None
    assert exact_s == pytest.approx(1.5388, 0.001)
    assert_mean(exact_s, [chain(1, 3), chain(2, 4)], 3.5)


def test_who_comes_first_begins_first() -> None:
    work = Work(np.array([0.0, 1.0, 2.0, 3.0]), np.array([10.0, 1.0, 1.0, 1.0]))
    served = simulate_chains([chain(1, 1), chain(3, 1)], "jffc", work)

    assert served.waiting_s.tolist() == [0.0, 0.0, 2.0, 4.0]
    assert served.service_s.tolist() == [10.0, 3.0, 3.0, 3.0]


def test_at_once_a_request_waits_at_its_chain() -> None:
    work = Work(np.array([0.0, 1.0, 2.0]), np.array([10.0, 1.0, 1.0]))
    served = simulate_chains([chain(1, 1), chain(20, 1)], "sed", work, Dispatch.INSTANT)

    assert served.waiting_s.tolist() == [0.0, 9.0, 9.0]
    assert served.response_s.tolist() == [10.0, 10.0, 10.0]


@pytest.mark.parametrize("most", [500_000, 3])
@pytest.mark.parametrize(
    ("policy", "dispatch"),
    [
        (policy, dispatch)
        for policy in sorted(chain_simulation.BY_VIEWS_ALONE)
        for dispatch in sorted(POLICIES[policy].dispatch, key=str)
    ],
)
def test_what_is_remembered_is_what_the_policy_says(
    policy: str, dispatch: Dispatch, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chains = [chain(1, 2), chain(1.5, 1), chain(4, 3)]
    monkeypatch.setattr(chain_simulation, "_MOST_REMEMBERED", most)
    work = draw_work(3.2, 2_000, 1)
    fast = simulate_chains(chains, policy, work, dispatch)
    monkeypatch.setattr(chain_simulation, "BY_VIEWS_ALONE", frozenset())
    slow = simulate_chains(chains, policy, work, dispatch)

    assert np.array_equal(fast.response_s, slow.response_s)


def test_whole_models_are_chains() -> None:
    """Two simulations that share no code: chains by jffc, and each request by its fastest path."""
    servers = LLAMA_2_7B.drawn(3)
    held = [range(LLAMA_2_7B.model.blocks)] * len(servers)
    placement = Placement(LLAMA_2_7B.model, servers, held)
    chains = [
        Chain((at,), (32,), server.time_s(32), placement.block_slots(at) // 32)
        for at, server in enumerate(servers)
    ]
    work = draw_work(60.0, 5_000, 1)
    ahead, own_way = simulate_chains(chains, "jffc", work), simulate_routing(placement, work)

    assert ahead.waiting_s.mean() > 0
    assert np.allclose(ahead.response_s, own_way.response_s)


@pytest.mark.parametrize("load", [0.1, 0.5, 0.9])
def test_jffc_is_within_its_bounds_and_not_beaten(load: float) -> None:
    """On 20 servers, with paired requests; the others in the form of dispatch that suits them."""
    options = ChainsOptions(
        policy="jffc,sed,sa_jsq,jsq,jiq",
        rate=0.8,
        load=load,
        requests=6_000,
        warmup=500,
        repeats=3,
        dispatch=Dispatch.INSTANT,
    )
    result = compare(options)
    jffc = result.policies[0]
    assert jffc.dispatch is Dispatch.POOL
    assert result.bounds is not None
    assert jffc.mean.half_width is not None
    assert result.bounds.lower_s < jffc.mean.mean + jffc.mean.half_width
    assert result.bounds.upper_s > jffc.mean.mean - jffc.mean.half_width
    for other in result.policies[1:]:
        assert result.against_first(other).mean > -0.01


def test_work_is_the_same_at_every_rate_but_closer() -> None:
    slow, fast = draw_work(1.0, 100, 5), draw_work(4.0, 100, 5)

    assert np.allclose(slow.arrival_s, 4 * fast.arrival_s)
    assert np.array_equal(slow.size, fast.size)
    assert not np.array_equal(slow.size, draw_work(1.0, 100, 6).size)


def test_a_trace_has_the_mean_that_is_asked_for() -> None:
    rows = (TraceRequest(10, 2, 5.0), TraceRequest(4000, 2, 6.0), TraceRequest(10, 90, 9.0))
    measured = Measured.of(Trace("three", "csv", rows), BLOOM_176B)
    work = draw_work(2.0, 3_000, 1, Arrivals.TRACE, Service.TRACE, measured)

    assert measured.gaps.tolist() == pytest.approx([1 / 2, 3 / 2, 1])
    assert work.size.mean() == pytest.approx(1)
    assert work.arrival_s[-1] == pytest.approx(1_500)
    at_10 = BLOOM_176B.request_s(10, 2) / BLOOM_176B.request_s(4000, 2)
    assert measured.sizes[0] / measured.sizes[1] == pytest.approx(at_10)
    poisson = draw_work(2.0, 3_000, 1, service=Service.TRACE, measured=measured)
    assert len(set(np.diff(poisson.arrival_s).round(9))) > 2_900


def test_requests_that_come_at_one_instant() -> None:
    measured = Measured.of(Trace("two", "csv", (TraceRequest(5, 5, 1.0),) * 2), BLOOM_176B)

    assert measured.gaps.tolist() == [0, 1]


def test_the_servers_of_the_paper() -> None:
    servers = BLOOM_176B.drawn(1)
    fast = [server for server in servers if server.memory_bytes == 40_000_000_000]

    assert (len(servers), len(fast)) == (20, 4)
    assert fast[0].block_s == pytest.approx(1e-3 + 5e9 / 120e12 * 2000 + 1.32 / 1020 * 19)
    assert all(20 * 0.023 <= server.hop_s <= 20 * 0.118 for server in servers)
    assert servers == BLOOM_176B.drawn(1) != BLOOM_176B.drawn(2)


@pytest.mark.parametrize(("share", "fast"), [(0.0, 0), (0.01, 1), (1.0, 20)])
def test_the_share_that_is_fast(share: float, fast: int) -> None:
    scenario = replace(BLOOM_176B, fast_share=share)

    assert sum(server.name.startswith("fast") for server in scenario.drawn(0)) == fast


def test_policies_that_look_ahead_are_not_for_chains() -> None:
    with pytest.raises(ConfigError, match="'bfio' is none for chains"):
        simulate_chains([chain(1, 1)], "bfio", draw_work(1, 10, 0))


def test_nothing_to_serve() -> None:
    nothing = Work(np.zeros(0), np.zeros(0))

    assert isinstance(simulate_chains([chain(1, 1)], "jffc", nothing), Served)
    assert len(simulate_chains([chain(1, 1)], "sed", nothing, Dispatch.INSTANT).response_s) == 0
