"""Ranks of a group never run different budgets in one step, whatever befalls the messages."""

from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine_patches.plugin.prompt_bound import PromptBound
from engine_patches.stream.prompt_leases import AGREE_STEPS
from router.core.wire import BUDGET_LEASE_S, BudgetMessage

RANKS = 3
LATE_S = (0.0, 0.0, 0.5, BUDGET_LEASE_S - 0.01, BUDGET_LEASE_S, 60.0)


class Rank:
    """One rank, with a clock of its own that goes on between all that happens."""

    def __init__(self, skew_s: float) -> None:
        self.now_s = 1000.0 + skew_s
        self.in_step = 0
        self.prompts = PromptBound(self, lockstep=True, clock=lambda: self.now_s)

    @property
    def told(self) -> int:
        return self.prompts.leases.tokens(self.now_s)

    def hear(self, message: Mapping[str, Any]) -> None:
        """A message that was lost, late, or repeated."""
        seen_s = max(0.0, self.now_s - message["late_s"])
        told = BudgetMessage(message["router"], "e", seen_s, message["tokens"])
        for _ in range(message["times"]):
            self.prompts.leases.take(told, self.now_s)

    def step(self) -> int:
        self.in_step = 0
        self.prompts.open()
        self.prompts.close()
        return self.in_step

    def bound(self, tokens: int) -> None:
        self.in_step = tokens

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
        "late_s": st.sampled_from(LATE_S),
        "times": st.integers(0, 2),
    }
)
# Of each step: messages before it, then how long each rank takes.
STEP = st.tuples(
    st.lists(MESSAGE, max_size=6), st.lists(st.floats(0, 2), min_size=RANKS, max_size=RANKS)
)


@given(
    st.lists(st.floats(-900, 900), min_size=RANKS, max_size=RANKS),
    st.lists(STEP, min_size=1, max_size=5 * AGREE_STEPS),
)
def test_all_ranks_have_one_budget_in_each_step(
    skews: Sequence[float], steps: Sequence[tuple[Sequence[Mapping[str, Any]], Sequence[float]]]
) -> None:
    ranks, agreed = [Rank(skew_s) for skew_s in skews], 0
    for number, (messages, times_s) in enumerate(steps, start=1):
        for message in messages:
            ranks[message["rank"]].hear(message)
        for rank, time_s in zip(ranks, times_s, strict=True):
            assert rank.step() == agreed
            rank.now_s += time_s
        least = min(rank.told for rank in ranks)
        collective = Collective(least)
        for rank in ranks:
            rank.prompts.stepped(number, collective.least)
        assert collective.joined in ([], [rank.told for rank in ranks])
        if collective.joined:
            agreed = least


@given(st.lists(MESSAGE, max_size=20), st.floats(0, BUDGET_LEASE_S))
def test_a_lease_ends_by_itself(messages: Sequence[Mapping[str, Any]], waited_s: float) -> None:
    rank = Rank(0.0)
    for message in messages:
        rank.hear(message)
    held = [m["tokens"] for m in messages if m["times"] and m["late_s"] < BUDGET_LEASE_S]
    assert rank.told in (held or [0])
    before = rank.told
    rank.now_s += waited_s
    assert before <= rank.told or not rank.told
    rank.now_s += BUDGET_LEASE_S
    assert rank.told == 0
