"""What holds of learned rates whatever happens, in whatever order and at whatever times."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.state.rates import MEMORY, GroupRates, ServiceRate

PLANS = st.none() | st.floats(1e-3, 1e3)
HAPPENINGS = st.lists(
    st.tuples(
        st.sampled_from(["join", "leave", "amend", "sent", "completed", "aborted"]),
        st.integers(0, 3),
        st.integers(1, 5),
        PLANS,
        st.floats(0, 1e4),
    ),
    max_size=60,
)


@given(HAPPENINGS)
@settings(max_examples=80, deadline=None)
def test_rates_are_positive_and_the_group_knows_the_sum_of_its_members(
    happenings: list[tuple[str, int, int, float | None, float]],
) -> None:
    rates, now_s = GroupRates(), 0.0
    members: list[tuple[ServiceRate, list[int]]] = [(rates.join(None), [])]
    for what, pick, requests, plan, later_s in happenings:
        now_s += later_s
        member, there = members[pick % len(members)]
        if what == "join":
            members.append((rates.join(plan), []))
        elif what == "leave" and len(members) > 1:
            members.remove((member, there))
            rates.leave(member)
        elif what == "amend":
            rates.amend(member, plan)
        elif what == "sent":
            member.sent(requests, 4, now_s)
            there.append(requests)
        elif there:
            member.gone(there.pop(0), now_s, complete=what == "completed")
        for each, _ in members:
            assert 0 < each.per_s < math.inf
            assert 0 <= each.estimate()[1] < 0.12
            assert each.completions < MEMORY + 5
    kept = rates.factor
    last = rates.join(None)
    rates.leave(last)
    assert kept == pytest.approx(rates.factor, rel=1e-6), "sums are as when taken anew"
