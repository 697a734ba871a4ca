"""Where a worker's joules go."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.energy.joules import (
    EnergyCounter,
    Joules,
    PowerLevels,
    RequestShares,
    Span,
    divided,
)
from router.core.errors import ConfigError
from router.core.step_time import StepTime, Work

LEVELS = PowerLevels(100.0, 200.0, 400.0)


def test_a_span_is_divided_by_time_and_power() -> None:
    found = divided(3.0, Span(0.005, 0.005), LEVELS)
    assert (found.useful_j, found.waiting_j, found.idle_j) == pytest.approx((2.0, 1.0, 0.0))
    found = divided(7.0, Span(0.005, 0.005, 0.01), LEVELS)
    assert (found.useful_j, found.waiting_j, found.idle_j) == pytest.approx((3.5, 1.75, 1.75))
    found = divided(9.0, Span(0.005, 0.0, 0.0, 0.01), LEVELS)
    assert (found.useful_j, found.unknown_j) == pytest.approx((3.0, 6.0))


def test_steps_add_up_in_a_span() -> None:
    span = Span(idle_s=0.5)
    span.step(0.1, 0.25)
    span.step(0.2, None)
    span.step(0.1, 1.0)
    found = (span.computing_s, span.waiting_s, span.idle_s, span.unknown_s)
    assert found == pytest.approx((0.075, 0.125, 0.5, 0.2))
    assert span.step_s == pytest.approx(0.4)


@given(
    st.floats(0, 1e6),
    st.floats(1e-4, 10),
    st.floats(0, 100),
    st.floats(0, 1),
    st.floats(0, 10),
)
def test_parts_add_up_to_the_counter(
    energy_j: float, step_s: float, idle_s: float, share: float, unknown_s: float
) -> None:
    span = Span(idle_s=idle_s, unknown_s=unknown_s)
    span.step(step_s, share)
    found = divided(energy_j, span, LEVELS)
    assert found.total_j == pytest.approx(energy_j)
    assert min(found.useful_j, found.waiting_j, found.idle_j, found.unknown_j) >= 0


def test_what_cannot_be_divided_is_unknown() -> None:
    assert divided(5.0, Span(0.01, 0.01), None) == Joules(unknown_j=5.0)
    assert divided(5.0, Span(idle_s=1.0, unknown_s=0.01), None) == Joules(unknown_j=5.0)
    assert divided(5.0, Span(idle_s=1.0), None) == Joules(idle_j=5.0)
    assert (Joules(1, 2, 3, 4) + Joules(unknown_j=1.0)).total_j == 11


@pytest.mark.parametrize(
    ("watts", "said"),
    [
        ((0.0, 200.0, 400.0), "idle_w must be watts above 0, got 0"),
        ((100.0, float("nan"), 400.0), "spin_w must be watts above 0, got nan"),
        ((300.0, 200.0, 400.0), "idle_w 300 is above spin_w 200 or busy_w 400"),
    ],
)
def test_levels_that_make_no_sense_are_refused(
    watts: tuple[float, float, float], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        PowerLevels(*watts)


def test_a_counter_is_read_from_its_first_reading_on_and_begins_anew() -> None:
    counter = EnergyCounter()
    readings: list[float | None] = [1000.0, 1003.0, 1003.0, 2.0]
    assert [counter.since(j, 50.0, 1.0) for j in readings] == [None, 3.0, 0.0, 2.0]
    assert counter.since(None, 50.0, 0.5) == 25.0
    assert counter.since(None, None, 0.5) is None
    assert counter.since(7.0, None, 0.5) is None
    assert counter.since(None, None, 0.5) is None
    assert counter.since(9.0, None, 0.5) == 2.0, "it went on while it could not be read"


def test_requests_share_a_workers_energy_by_the_tokens_that_they_hold() -> None:
    shares = RequestShares()
    shares.step(0.5, Work(400, 3), {"a": Work(100, 1)}, None)
    assert shares.of("a") is None, "no meter has been read"
    shares.pay(100.0, 0.5)
    assert shares.of("a") == pytest.approx(25)
    shares.step(0.5, Work(200, 3), {"a": Work(100, 1), "b": Work(50, 1)}, None)
    assert [shares.of("a"), shares.of("b")] == pytest.approx([75, 25])
    shares.pay(200.0, 0.5)
    assert [shares.of("a"), shares.of("b")] == pytest.approx([125, 50])
    shares.pay(7.0, 0.0)
    assert shares.of("c") is None
    shares.forget("a")
    shares.forget("a")
    assert shares.of("a") is None


def test_requests_share_a_workers_energy_by_what_their_work_costs() -> None:
    parts = {"decodes": Work(400, 1), "computes": Work(100, 1, 50)}
    cost = StepTime(9.0, 0.01, 1.0, 0.1)
    shares = RequestShares()
    shares.step(1.0, Work(500, 2, 50), parts, cost)
    shares.pay(120.0, 1.0)
    each = {request: shares.of(request) for request in parts}
    assert each == pytest.approx({"decodes": 50, "computes": 70})
    assert sum(filter(None, each.values())) == pytest.approx(120), "all that the step has used"
    shares.step(1.0, Work(500, 2, 50), parts, StepTime(9.0))
    assert shares.of("decodes") == pytest.approx(50 + 96), "by tokens where no work costs anything"


def test_what_holds_nothing_has_no_share() -> None:
    shares = RequestShares()
    shares.step(0.5, Work(), {"a": Work()}, None)
    shares.pay(100.0, 0.5)
    assert shares.of("a") == 0
