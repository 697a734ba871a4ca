"""Ranks of a group never run different budgets in one step, whatever befalls the messages."""

from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine_patches.plugin.prompt_bound import PromptBound
from engine_patches.stream.prompt_leases import AGREE_STEPS, NO_BUDGET, packed, unpacked
from router.core.step_time import StepBudget
from router.core.wire import BUDGET_LEASE_S, MOST_EVERY, BudgetMessage

RANKS = 3
LATE_S = (0.0, 0.0, 0.5, BUDGET_LEASE_S - 0.01, BUDGET_LEASE_S, 60.0)


class Rank:
    """One rank, with a clock of its own that goes on between all that happens."""

    def __init__(self, skew_s: float) -> None:
        self.now_s = 1000.0 + skew_s
        self.in_step: int | None = None
        self.prompts = PromptBound(self, lockstep=True, clock=lambda: self.now_s)

    @property
    def told(self) -> StepBudget:
        return self.prompts.leases.least(self.now_s)

    def hear(self, message: Mapping[str, Any]) -> None:
        """A message that was lost, late, or repeated."""
        seen_s = max(0.0, self.now_s - message["late_s"])
        told = BudgetMessage(message["router"], "e", seen_s, message["tokens"], message["every"])
        for _ in range(message["times"]):
            self.prompts.leases.take(told, self.now_s)

    def step(self) -> int | None:
        """Most prompt tokens; None: as vLLM decides."""
        self.in_step = None
        self.prompts.open()
        self.prompts.close()
        return self.in_step

    def bound(self, tokens: int) -> None:
        self.in_step = tokens

    def hold(self) -> None:
        self.in_step = 0

    def free(self) -> None: ...


class Collective:
    """What the ranks compute together."""

    def __init__(self, result: int) -> None:
        self.joined: list[int] = []
        self._result = result

    def least(self, own: int) -> int:
        self.joined.append(own)
        return self._result


MESSAGE = st.fixed_dictionaries(
    {
        "rank": st.integers(0, RANKS - 1),
        "router": st.sampled_from(["one", "two", "dead"]),
        "tokens": st.integers(1, 4096),
        "every": st.sampled_from([1, 1, 2, 20]),
        "late_s": st.sampled_from(LATE_S),
        "times": st.integers(0, 2),
    }
)
# Of each step: messages before it, how long each rank takes, and whether all are idle then.
STEP = st.tuples(
    st.lists(MESSAGE, max_size=6),
    st.lists(st.floats(0, 2), min_size=RANKS, max_size=RANKS),
    st.sampled_from([False] * 9 + [True]),
)


@given(
    st.lists(st.floats(-900, 900), min_size=RANKS, max_size=RANKS),
    st.lists(STEP, min_size=1, max_size=5 * AGREE_STEPS),
)
def test_all_ranks_have_one_budget_in_each_step(
    skews: Sequence[float],
    steps: Sequence[tuple[Sequence[Mapping[str, Any]], Sequence[float], bool]],
) -> None:
    ranks, agreed, number = [Rank(skew_s) for skew_s in skews], NO_BUDGET, 0
    for messages, times_s, idle in steps:
        bound = agreed.at(number) if agreed.tokens else None
        number = 0 if idle else number + 1
        for message in messages:
            ranks[message["rank"]].hear(message)
        for rank, time_s in zip(ranks, times_s, strict=True):
            assert rank.step() == bound
            rank.now_s += time_s
        least = min((rank.told for rank in ranks), key=packed)
        collective = Collective(packed(least))
        for rank in ranks:
            rank.prompts.stepped(number, collective.least)
        assert collective.joined in ([], [packed(rank.told) for rank in ranks])
        if collective.joined:
            agreed = least


BUDGET = st.builds(StepBudget, st.integers(1, 1 << 32), st.integers(1, MOST_EVERY - 1))


@given(BUDGET, BUDGET)
def test_the_least_budget_has_the_fewest_tokens_a_step(one: StepBudget, other: StepBudget) -> None:
    """Up to a token; vLLM reduces 64-bit numbers."""
    assert unpacked(packed(one)) == one
    assert packed(NO_BUDGET) < packed(one) < 1 << 63
    least, most = sorted((one, other), key=packed)
    assert least.tokens // least.every <= most.tokens // most.every


@given(st.lists(MESSAGE, max_size=20), st.floats(0, BUDGET_LEASE_S))
def test_a_lease_ends_by_itself(messages: Sequence[Mapping[str, Any]], waited_s: float) -> None:
    rank = Rank(0.0)
    for message in messages:
        rank.hear(message)
    held = [m for m in messages if m["times"] and m["late_s"] < BUDGET_LEASE_S]
    assert rank.told in ([StepBudget(m["tokens"], m["every"]) for m in held] or [NO_BUDGET])
    before = rank.told
    rank.now_s += waited_s
    assert packed(before) <= packed(rank.told) or rank.told == NO_BUDGET
    rank.now_s += BUDGET_LEASE_S
    assert rank.told == NO_BUDGET
