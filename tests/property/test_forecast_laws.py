"""Laws of work profiles, forecasts, signals and survival curves."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.forecast.end_signals import (
    CapSignal,
    NoSignal,
    ReportedSignal,
    Signal,
    SurvivalSignal,
    steps_to_cap,
)
from router.core.forecast.forecast import NO_CAP, Chances, Ends, Running, WorkProfile, forecast
from tests.support.lookahead import column, departure, running

WORKERS = 3
PROFILES = st.builds(
    WorkProfile,
    growth=st.sampled_from([0.0, 0.5, 1.0, 2.5]),
    window=st.none() | st.integers(1, 60),
    window_share=st.sampled_from([0.0, 0.25, 1.0]),
    request_tokens=st.sampled_from([0.0, 800.0]),
    prefill_beta=st.sampled_from([0.0, 0.5, 3.0]),
    prefill_chunk=st.integers(1, 40),
)
PLAIN = st.builds(WorkProfile, growth=st.sampled_from([0.0, 1.0, 2.5]))
REQUEST = st.tuples(
    st.integers(1, 80),  # prompt
    st.integers(0, WORKERS - 1),
    st.integers(0, 30),  # generated
    st.integers(1, 20) | st.just(NO_CAP),  # tokens left to the cap
    st.sampled_from([0.0, 0.1, 0.5, 1.0, np.nan]),
    st.integers(0, 80),  # prompt tokens left
)


def _columns(rows: list[tuple[int, int, int, int, float, int]]) -> Running:
    prompts, worker, generated, caps, p, left = map(list, zip(*rows, strict=True))
    return running(
        prompts,
        worker=worker,
        generated=generated,
        caps=[g + c for g, c in zip(generated, caps, strict=True)],
        p=p,
        left=[min(each) for each in zip(prompts, left, strict=True)],
    )


RUNNING = st.lists(REQUEST, min_size=1, max_size=12).map(_columns)


def scalar_work(profile: WorkProfile, tokens: int, left: int, steps: int) -> list[float]:
    """One request, simulated step by step; the last also has what is left of its prompt."""
    work = []
    held = float(tokens)
    for _ in range(steps):
        computed = min(left, profile.prefill_chunk) if profile.prefill_beta else 0
        left -= computed
        seen = held if profile.window is None else min(held, profile.window)
        share = profile.window_share
        attended = (1 - share) * held + share * seen
        work.append(attended + profile.request_tokens + profile.prefill_beta * computed)
        if left == 0 or not profile.prefill_beta:
            held += profile.growth
    work[-1] += profile.prefill_beta * left
    return work


@given(PROFILES, RUNNING, st.integers(1, 12))
def test_work_is_that_of_a_simulation(profile: WorkProfile, now: Running, steps: int) -> None:
    work = profile.work(now.tokens, now.prefill_left, steps)
    for row, tokens, left in zip(work, now.tokens, now.prefill_left, strict=True):
        assert row.tolist() == pytest.approx(scalar_work(profile, int(tokens), int(left), steps))


@given(PROFILES, RUNNING, st.integers(0, 12), st.data())
def test_a_forecast_is_the_sum_of_its_requests(
    profile: WorkProfile, now: Running, horizon: int, data: st.DataObject
) -> None:
    lasting = st.lists(st.integers(1, 15), min_size=len(now), max_size=len(now))
    ends = Ends(column(data.draw(lasting)))
    expected = np.zeros((WORKERS, horizon + 1))
    for row in range(len(now)):
        left = int(now.prefill_left[row])
        work = scalar_work(profile, int(now.tokens[row]), left, horizon + 1)
        for ahead in range(min(horizon + 1, int(ends.steps[row]))):
            expected[now.worker[row], ahead] += work[ahead]
    assert forecast(now, ends, profile, WORKERS, horizon) == pytest.approx(expected)
    chances = Chances(ends.chances(horizon + 1))
    assert forecast(now, chances, profile, WORKERS, horizon) == pytest.approx(expected)


@given(PLAIN, RUNNING, st.integers(0, 12), st.randoms(use_true_random=False))
def test_the_order_of_the_rows_does_not_matter(
    profile: WorkProfile, now: Running, horizon: int, random: object
) -> None:
    rows = list(range(len(now)))
    random.shuffle(rows)  # type: ignore[attr-defined]
    shuffled = now.take(column(rows))
    for signal in (CapSignal(profile), ReportedSignal(profile)):
        one, other = (
            forecast(each, signal.predict(each, horizon), profile, WORKERS, horizon)
            for each in (now, shuffled)
        )
        assert one == pytest.approx(other)


@given(PROFILES, RUNNING, st.integers(0, 12), st.lists(st.integers(1, 40), max_size=20))
def test_no_signal_outlives_a_cap_or_forgets_who_runs(
    profile: WorkProfile, now: Running, horizon: int, lengths: list[int]
) -> None:
    survival = SurvivalSignal(profile, learned_tokens=32)
    for length in lengths:
        survival.ended(departure(length))
    survival.advance(256)
    survival.observe(now)
    ahead = np.arange(horizon + 1)
    over = ahead >= steps_to_cap(now, profile)[:, None]
    signals: list[Signal] = [CapSignal(profile), ReportedSignal(profile), survival]
    for signal in signals:
        chances = signal.predict(now, horizon).chances(horizon + 1)
        assert (chances[:, 0] == 1).all()
        assert (chances[over] == 0).all()
        assert (np.diff(chances, axis=1) <= 1e-12).all()
        assert (chances >= 0).all()
    assert NoSignal().predict(now, horizon).chances(horizon + 1).all()


@given(
    st.lists(st.tuples(st.integers(1, 12), st.booleans()), min_size=1, max_size=30),
    st.lists(st.integers(0, 12), max_size=10),
)
def test_a_curve_is_that_of_kaplan_and_meier(
    departures: list[tuple[int, bool]], still_running: list[int]
) -> None:
    signal = SurvivalSignal(memory_steps=1e12, borrowed=1e-9, learned_tokens=16)
    for length, completed in departures:
        signal.ended(departure(length, completed=completed))
    signal.advance(1000)
    signal.observe(running([100] * len(still_running), generated=still_running))
    curve = signal.survival(100)
    survival = 1.0
    reached = [length for length, _ in departures] + still_running
    for age in range(1, max(reached) + 1):
        at_risk = sum(length >= age for length in reached)
        survival *= 1 - departures.count((age, True)) / at_risk
        assert curve[age] == pytest.approx(survival, rel=1e-6, abs=1e-6)


@given(RUNNING, st.integers(0, 12))
def test_a_better_known_end_only_lowers_the_forecast(now: Running, horizon: int) -> None:
    blind = replace(now, end_probability=np.full(len(now), np.nan))
    told, untold = (
        forecast(each, ReportedSignal().predict(each, horizon), WorkProfile(), WORKERS, horizon)
        for each in (now, blind)
    )
    assert (told <= untold + 1e-9).all()
