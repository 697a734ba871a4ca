"""The look-ahead of a group: outlooks, and parameters that follow the work."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest

from router.core.forecast.end_signals import (
    CapSignal,
    NoSignal,
    ReportedSignal,
    Signal,
    SurvivalSignal,
)
from router.core.forecast.forecast import Ends, Outlook, Running, WorkProfile, forecast
from router.core.forecast.look_ahead import (
    BLIND_LEAD,
    BLIND_TIE_WEIGHT,
    FIRST_SIZE_TOKENS,
    LEAD,
    REVIEW_STEPS,
    LookAhead,
    Parameters,
    choose,
)
from router.core.types import DEFAULT_SLOTS
from tests.support.lookahead import Fleet, column, departure, running

NOW = running([10, 20, 30], worker=[0, 1, 1], generated=[0, 1, 2], caps=[2, 9, 9])


class Deaf(Signal):
    """A signal that has lost its skill."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__()
        self.fleet = fleet
        self.deaf = False

    def predict(self, running: Running, horizon: int) -> Ends:
        ends = self.fleet.predict(running, horizon)
        return Ends(column(ends.steps[::-1])) if self.deaf else ends


class Renewing(LookAhead):
    """Asks for the requests of those workers only that have changed.

    Attributes:
        asked: of which workers, each time.
    """

    asked: list[list[int]]

    def outlook(self, running: Running, workers: int, slots: int) -> Outlook:
        self.asked = getattr(self, "asked", [])
        shown = [running.take(running.worker == worker) for worker in range(workers)]
        columns = ("id", "prompt_tokens", "generated_tokens")
        versions = [hash(b"".join(getattr(one, i).tobytes() for i in columns)) for one in shown]

        def some(places: Iterable[int]) -> Running:
            self.asked.append(list(places))
            rows = np.flatnonzero(np.isin(running.worker, self.asked[-1]))
            one = running.take(rows)
            return replace(one, worker=np.searchsorted(self.asked[-1], one.worker))

        return self.renewed(versions, some, slots)


def fleet() -> Fleet:
    return Fleet(2, 64, np.random.default_rng(0).geometric(0.02, 5000))


def lived(look_ahead: LookAhead, fleet: Fleet, steps: int) -> list[Outlook]:
    outlooks = []
    for _ in range(steps):
        now = fleet.running()
        if look_ahead.needs_running:
            outlooks.append(look_ahead.outlook(now, 2, 64))
        else:
            loads = np.bincount(now.worker, now.tokens, 2)
            outlooks.append(look_ahead.outlook_from_loads(loads, np.bincount(now.worker), 64))
        for each in fleet.step():
            look_ahead.ended(each)
        look_ahead.advance()
    return outlooks


def test_an_outlook_is_a_forecast_with_weights() -> None:
    look_ahead = LookAhead(CapSignal(), horizon=3, discount=0.7, tie_weight=0.01, lead_tokens=40)
    assert look_ahead.needs_running
    outlook = look_ahead.outlook(NOW, 2, 72)
    expected = forecast(NOW, CapSignal().predict(NOW, 3), WorkProfile(), 2, 3)
    assert np.array_equal(outlook.work, expected)
    assert (outlook.discount, outlook.tie_weight, outlook.lead_tokens) == (0.7, 0.01, 40)
    assert look_ahead.parameters == Parameters(3, 0.7, 0.01, 40)


def test_without_a_signal_the_loads_will_do() -> None:
    look_ahead = LookAhead(NoSignal(), WorkProfile(request_tokens=800))
    assert not look_ahead.needs_running
    assert look_ahead.skill is None
    cheap = look_ahead.outlook_from_loads(np.array([10.0, 53.0]), column([1, 2]), 72)
    assert np.array_equal(cheap.work, look_ahead.outlook(NOW, 2, 72).work)
    assert cheap.work.tolist() == [[810], [1653]]
    look_ahead.advance(REVIEW_STEPS)
    assert (cheap.discount, cheap.tie_weight) == (1.0, BLIND_TIE_WEIGHT)
    assert look_ahead.parameters.horizon == 0


@pytest.mark.parametrize("profile", [WorkProfile(window=9), WorkProfile(prefill_beta=1)])
def test_a_profile_that_is_not_plain_needs_the_running(profile: WorkProfile) -> None:
    assert LookAhead(NoSignal(), profile).needs_running


def test_skill_is_measured_now_and_then_where_the_rule_asks_for_it() -> None:
    assert not LookAhead(CapSignal(), horizon=0).needs_running
    look_ahead = LookAhead(CapSignal())
    assert look_ahead.needs_running
    look_ahead.outlook(NOW, 2, 72)
    assert not look_ahead.needs_running
    look_ahead.advance(16)
    assert look_ahead.needs_running


def test_the_horizon_follows_the_skill() -> None:
    farm = fleet()
    signal = Deaf(farm)
    look_ahead = LookAhead(signal)
    assert lived(look_ahead, farm, 2 * REVIEW_STEPS)[0].work.shape == (2, 1)
    assert look_ahead.skill == 1
    horizon = look_ahead.parameters.horizon
    assert horizon > 0
    assert lived(look_ahead, farm, 1)[0].work.shape == (2, horizon + 1)
    signal.deaf = True
    lived(look_ahead, farm, 5000)
    lead_tokens = BLIND_LEAD * look_ahead._lengths.mean_tokens
    assert look_ahead.parameters.lead_tokens == pytest.approx(lead_tokens, rel=0.1)
    assert replace(look_ahead.parameters, lead_tokens=0) == Parameters(0, 1.0, BLIND_TIE_WEIGHT)


def test_a_survival_curve_alone_has_too_little_skill() -> None:
    look_ahead = LookAhead(SurvivalSignal())
    lived(look_ahead, fleet(), 2000)
    assert look_ahead.skill == pytest.approx(0, abs=0.05)
    assert look_ahead.parameters.horizon == 0


def test_the_mean_output_is_learned_from_all() -> None:
    look_ahead = LookAhead(NoSignal())
    assert look_ahead._lengths.mean_tokens == 256
    for _ in range(20_000):
        look_ahead.ended(departure(60))
        look_ahead.ended(departure(20, completed=False))
    assert look_ahead._lengths.mean_tokens == pytest.approx(80, rel=0.02)


def test_the_tie_weight_follows_what_leaves_with_a_request() -> None:
    """The cost of a running request leaves with it, too; an aborted one counts like another."""
    look_ahead = LookAhead(CapSignal(), WorkProfile(request_tokens=800), horizon=8)
    first = look_ahead.parameters.tie_weight
    for _ in range(20_000):
        look_ahead.ended(departure(156, prompt=9844))
        look_ahead.ended(departure(100, prompt=4900, completed=False))
    look_ahead.advance(REVIEW_STEPS)
    sizes = (FIRST_SIZE_TOKENS + 800) / (7500 + 800)
    assert look_ahead.parameters.tie_weight / first == pytest.approx(sizes, rel=0.02)


@pytest.mark.parametrize("growth", [0.0, 0.5, 1.0])
def test_the_lead_is_what_requests_gain(growth: float) -> None:
    look_ahead = LookAhead(NoSignal(), WorkProfile(growth=growth))
    assert look_ahead.parameters.lead_tokens == BLIND_LEAD * growth * 256


def test_with_accepted_drafts_requests_end_the_sooner() -> None:
    """Two tokens a step: twice the growth for half as long, and ends come twice as often."""
    look_ahead = LookAhead(CapSignal(), WorkProfile(growth=2), horizon=8)
    look_ahead.outlook(NOW, 2, 72)
    assert look_ahead.parameters == choose(2, 72, 128, FIRST_SIZE_TOKENS, None, 8, growth=2)
    assert look_ahead.parameters.lead_tokens == LEAD * 256
    assert look_ahead.parameters.discount == choose(2, 144, 256, 1000, None, 8).discount


def test_another_fleet_has_other_weights_at_once() -> None:
    look_ahead = LookAhead(CapSignal(), horizon=20)
    assert look_ahead.parameters == choose(1, DEFAULT_SLOTS, 256, FIRST_SIZE_TOKENS, None, 20)
    for slots in (16, 72):
        outlook = look_ahead.outlook(NOW, 2, slots)
        assert outlook.discount == choose(2, slots, 256, FIRST_SIZE_TOKENS, None, 20).discount
        assert look_ahead.parameters == choose(2, slots, 256, FIRST_SIZE_TOKENS, None, 20)


def test_another_profile_holds_for_forecast_signal_and_parameters() -> None:
    look_ahead = LookAhead(ReportedSignal(), horizon=1)
    before = look_ahead.parameters
    look_ahead.follow(WorkProfile(growth=2, request_tokens=7))
    assert look_ahead.step_tokens == 2
    assert look_ahead.parameters.lead_tokens == before.lead_tokens, (
        "twice the growth, half the steps"
    )
    work = look_ahead.outlook(NOW, 2, 72).work
    # The first has a token to its cap; the others gain two in each step.
    assert work.tolist() == [[17, 0], [21 + 7 + 32 + 7, 23 + 7 + 34 + 7]]
    look_ahead.follow(look_ahead.profile)
    assert look_ahead.outlook(NOW, 2, 72).work.tolist() == work.tolist()


def test_a_survival_curve_follows_the_profile() -> None:
    look_ahead = LookAhead(SurvivalSignal(), horizon=1)
    one = look_ahead.signal.predict(NOW, 1).chances(2)[:, 1]
    look_ahead.follow(WorkProfile(growth=2))
    two = look_ahead.signal.predict(NOW, 1).chances(2)[:, 1]
    assert two[1:] == pytest.approx(one[1:] ** 2, rel=0.01), "a step is two tokens"


def test_only_workers_that_have_changed_are_looked_at_again() -> None:
    look_ahead = Renewing(CapSignal(), horizon=3)
    first = look_ahead.outlook(NOW, 2, 72)
    assert np.array_equal(look_ahead.outlook(NOW, 2, 72).work, first.work)
    later = replace(NOW, prompt_tokens=column([10, 25, 30]))
    second = look_ahead.outlook(later, 2, 72)
    assert look_ahead.asked == [[0, 1], [1]]
    assert (second.work - first.work).tolist() == [[0, 0, 0, 0], [5, 5, 5, 5]]
    third = look_ahead.outlook(replace(NOW, worker=column([0, 1, 2])), 3, 72)
    assert third.work[:, 0].tolist() == [10, 21, 32]
    assert look_ahead.asked[2:] == [[0, 1, 2]]


@pytest.mark.parametrize("make", [CapSignal, SurvivalSignal])
@pytest.mark.parametrize("horizon", [None, 5])
def test_what_is_renewed_is_what_is_worked_out_anew(
    make: Callable[[], Signal], horizon: int | None
) -> None:
    """Curves are learned and skill is measured meanwhile."""
    plain, renewing = LookAhead(make(), horizon=horizon), Renewing(make(), horizon=horizon)
    farm, others = fleet(), fleet()
    for _ in range(5):
        expected, renewed = lived(plain, farm, 120), lived(renewing, others, 120)
        for one, other in zip(expected, renewed, strict=True):
            assert np.array_equal(one.work, other.work)
        again = renewing.outlook(others.running(), 2, 64)
        assert np.array_equal(again.work, plain.outlook(farm.running(), 2, 64).work)
        assert np.array_equal(again.work, renewing.outlook(others.running(), 2, 64).work)
    assert plain.skill == renewing.skill


@pytest.mark.parametrize("make", [CapSignal, SurvivalSignal])
def test_the_same_calls_give_the_same_outlooks(make: type[Signal]) -> None:
    one, other = (lived(LookAhead(make(), horizon=5), fleet(), 300) for _ in range(2))
    assert all(np.array_equal(a.work, b.work) for a, b in zip(one, other, strict=True))
