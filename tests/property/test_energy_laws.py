"""Requests' joules and those that nobody has are the workers' joules."""

from collections import defaultdict
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.energy.joules import PowerLevels
from router.core.state.barrier import StepLedger
from router.core.step_time import StepTime, Work
from router.core.types import PoolState
from tests.support.core import fed, snapshot

LEVELS = PowerLevels(50.0, 150.0, 300.0)
STEPS = 12
WORKERS = "ab"


class Stay(NamedTuple):
    """A request on a worker: from a step on, for so many."""

    worker: str
    first: int
    steps: int
    prompt_tokens: int

    def tokens(self, step: int) -> int:
        here = self.first <= step < self.first + self.steps
        return self.prompt_tokens + step - self.first if here else 0


STAYS = st.lists(
    st.builds(Stay, st.sampled_from(WORKERS), *[st.integers(1, STEPS)] * 2, st.integers(1, 500)),
    max_size=6,
)
STEP_S = st.floats(0.01, 0.2)


class Ledger:
    """Told of steps with a meter's count; follows what requests nobody shares."""

    def __init__(
        self, stays: list[Stay], levels: PowerLevels | None, cost: StepTime | None = None
    ) -> None:
        self.ledger = StepLedger(levels)
        self.ledger.fixed = cost
        self.stays = dict(enumerate(stays))
        self.counted = dict.fromkeys(WORKERS, 700.0)
        self.nobodys_j = 0.0
        self.now_s = 0.0

    def step(self, step: int, step_s: float, used: dict[str, float], *, read: bool) -> None:
        self.now_s += step_s
        for worker in WORKERS:
            held = {str(i): s.tokens(step) for i, s in self.stays.items() if s.worker == worker}
            held = {i: tokens for i, tokens in held.items() if tokens}
            load = sum(held.values())
            # In every third step a request computes some of its prompt.
            prompts = {i: 7 * (1 + int(i)) * ((step + int(i)) % 3 == 0) for i in held}
            work = {i: Work(tokens, 1, prompts[i]) for i, tokens in held.items()}
            self.nobodys_j += 0.0 if load else used[worker]
            self.counted[worker] += used[worker]
            told = self.counted[worker] if read else None
            message = snapshot("delta", step, step_s=step_s)
            told_of = {"energy_j": told, "scheduled_prefill_tokens": sum(prompts.values())}
            message = msgspec.structs.replace(message, time_s=self.now_s, **told_of)
            shares = fed(load, load, running=len(held), asked=work)
            self.ledger.report(worker, shares, message, PoolState.EMPTY, 0)
            self.ledger.complete(WORKERS, PoolState.EMPTY)

    def begin(self) -> None:
        """What counters show first is nobody's."""
        self.step(0, 0.0, dict.fromkeys(WORKERS, 0.0), read=True)

    def requests_j(self) -> float:
        of = self.ledger.energy.of_request
        return sum(of(stay.worker, str(i)) or 0.0 for i, stay in self.stays.items())

    @property
    def workers_j(self) -> float:
        return self.ledger.energy.joules.total_j


@given(
    STAYS,
    st.lists(st.tuples(STEP_S, *[st.floats(0.1, 100)] * 2), min_size=STEPS, max_size=STEPS),
    st.sampled_from([LEVELS, None]),
    st.sampled_from([StepTime(5e-3, 1e-7, 4e-5, 5e-5), StepTime(5e-3, 0.0, 4e-5), None]),
)
def test_requests_joules_add_up_step_by_step(
    stays: list[Stay],
    steps: list[tuple[float, float, float]],
    levels: PowerLevels | None,
    cost: StepTime | None,
) -> None:
    ledger = Ledger(stays, levels, cost)
    ledger.begin()
    for number, (step_s, a, b) in enumerate(steps, 1):
        ledger.step(number, step_s, {"a": a, "b": b}, read=True)
    assert ledger.requests_j() == pytest.approx(ledger.workers_j - ledger.nobodys_j, abs=1e-6)


@given(STAYS, st.lists(STEP_S, min_size=STEPS, max_size=STEPS), st.integers(1, 5))
def test_a_meter_that_is_read_seldom_gives_each_its_part_of_even_power(
    stays: list[Stay], steps: list[float], every: int
) -> None:
    ledger, expected = Ledger(stays, LEVELS), defaultdict[int, float](float)
    ledger.begin()
    for number, step_s in enumerate(steps, 1):
        read = number % every == 0
        ledger.step(number, step_s, dict.fromkeys(WORKERS, 200.0 * step_s), read=read)
        for worker in WORKERS:
            held = {i: s.tokens(number) for i, s in ledger.stays.items() if s.worker == worker}
            for i, tokens in held.items():
                expected[i] += 200.0 * step_s * tokens / (sum(held.values()) or 1)
    for i, stay in ledger.stays.items():
        found = ledger.ledger.energy.of_request(stay.worker, str(i))
        assert found == pytest.approx(expected[i], abs=1e-6)
