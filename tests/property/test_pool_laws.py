"""The pool against a plain sorted list."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from router.core.policies.policy_table import POLICIES, PolicySettings
from router.core.queue.fair_share import FairShare
from router.core.queue.pool import Pool
from router.core.queue.tier import Tier
from router.core.rounds import assignment as rounds
from router.core.types import Request
from tests.support.core import request, views

PATIENCE, TIMEOUT = 5.0, 12.0

WAITING = st.lists(
    st.tuples(st.integers(-1, 1), st.integers(0, 20), st.sampled_from([1, 1, 1, 2, 4])),
    max_size=12,
).map(
    lambda rows: [
        request(i, 10 * i, slots=slots, priority=priority, arrival=arrival)
        for i, (priority, arrival, slots) in enumerate(rows)
    ]
)


def pool_of(waiting: Iterable[Request]) -> Pool:
    pool = Pool(10, PATIENCE, TIMEOUT)
    for one in waiting:
        pool.add(one)
    return pool


@given(WAITING, st.lists(st.integers(0, 11)), st.integers(0, 30))
def test_order_size_and_expiry(waiting: Sequence[Request], taken: Sequence[int], now: int) -> None:
    pool, model = pool_of(waiting), list(waiting)
    for number in taken:
        known = [one for one in model if one.id == request(number).id]
        assert pool.remove(request(number).id) == (known[0] if known else None)
        model = [one for one in model if one not in known]
    model.sort(key=lambda one: (one.priority, one.arrival_s))
    assert list(pool) == model
    assert (len(pool), pool.full) == (len(model), len(model) >= 10)
    assert all(one.id in pool for one in model)
    assert pool.expired(now) == [one for one in model if now - one.arrival_s >= TIMEOUT]


@given(WAITING, st.data())
def test_who_comes_back_stands_where_it_stood_among_other_arrivals(
    waiting: Sequence[Request], data: st.DataObject
) -> None:
    pool = pool_of(waiting)
    before = [(one.priority, one.arrival_s) for one in pool]
    for one in data.draw(st.permutations(waiting)):
        pool.remove(one.id)
        pool.add(one)
        assert [(each.priority, each.arrival_s) for each in pool] == before


@given(WAITING, st.integers(0, 30), st.integers(0, 15), st.integers(0, 500))
def test_tiers_are_the_whole_pool_by_priority(
    waiting: Sequence[Request], now: int, capacity: int, gap_tokens: int
) -> None:
    pool = pool_of(waiting)
    tiers = pool.tiers(now, capacity, gap_tokens)
    assert all(tiers)
    everyone = list(chain.from_iterable(tiers))
    assert sorted(one.id for one in everyone) == sorted(one.id for one in pool)
    assert [one.priority for one in everyone] == [one.priority for one in pool]
    for tier in tiers:
        assert list(tier) == [one for one in pool if one in tier]


@given(WAITING, st.lists(st.integers(0, 11)), st.integers(0, 30), st.integers(0, 500))
def test_a_tier_of_a_pool_is_a_tier_of_its_requests(
    waiting: Sequence[Request], taken: Sequence[int], now: int, gap_tokens: int
) -> None:
    pool = pool_of(waiting)
    for number in taken:
        pool.remove(request(number).id)
    for tier in pool.tiers(now, 5, gap_tokens):
        alone = Tier.of(list(tier))
        assert tier.prompt_tokens.tolist() == alone.prompt_tokens.tolist()
        assert tier.slots.tolist() == alone.slots.tolist()
        assert all(tier.by_id[one.id] is one for one in tier)


@given(WAITING, st.integers(0, 30), st.integers(0, 15))
def test_tiers_are_the_pool_in_order_cut_where_patience_ends(
    waiting: Sequence[Request], now: int, capacity: int
) -> None:
    """Without a gap that anybody could fit into."""
    pool = pool_of(waiting)
    tiers = pool.tiers(now, capacity, -1)
    assert list(chain.from_iterable(tiers)) == list(pool)
    priorities = [{one.priority for one in tier} for tier in tiers]
    assert all(len(each) == 1 for each in priorities)
    for tier, later, same in zip(tiers, tiers[1:], priorities[1:], strict=False):
        if {tier[0].priority} == same:
            assert all(now - one.arrival_s >= PATIENCE for one in tier)
            assert sum(one.slots for one in tier) <= capacity or len(tier) == 1
            assert tier[-1].arrival_s <= later[0].arrival_s


@given(
    WAITING,
    st.integers(0, 30),
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
    st.integers(0, 500),
    st.sampled_from(sorted(POLICIES)),
)
def test_whoever_lost_patience_gets_in_before_any_younger_one(
    waiting: Sequence[Request], now: int, capacity: Sequence[int], gap_tokens: int, name: str
) -> None:
    pool = pool_of(waiting)
    policy = POLICIES[name].make(PolicySettings())
    tiers = pool.tiers(now, sum(capacity), gap_tokens)
    done = rounds.assign(policy, tiers, views([0] * len(capacity), capacity))
    inside = {assignment.request_id for assignment in done}
    slots = 0
    for one in pool:
        slots += one.slots
        if slots > sum(capacity) or now - one.arrival_s < PATIENCE:
            break
        assert one.id in inside


@given(
    WAITING,
    st.lists(st.sampled_from("abc"), min_size=12, max_size=12),
    st.fixed_dictionaries({tenant: st.integers(0, 9) for tenant in "abc"}),
    st.integers(0, 30),
    st.integers(0, 15),
)
def test_turns_change_the_order_and_leave_nobody_out(
    waiting: Sequence[Request],
    tenants: Sequence[str],
    held: dict[str, int],
    now: int,
    capacity: int,
) -> None:
    owned = [replace(one, tenant=name) for one, name in zip(waiting, tenants, strict=False)]
    pool, fair = pool_of(owned), FairShare()
    fair.see(0.0, held)
    fair.see(9.0, held)
    turns = fair.turns(held, pool.slots_of, capacity)
    assert all(turns)
    offered = [tenant for turn in turns for tenant in turn]
    assert len(set(offered)) == len(offered)
    everyone = list(chain.from_iterable(pool.tiers(now, capacity, 0, turns)))
    assert sorted(one.id for one in everyone) == sorted(one.id for one in pool)
    if sum(pool.slots_of.values()) <= capacity:
        assert set(offered) == set(pool.slots_of), "there is room for all"
