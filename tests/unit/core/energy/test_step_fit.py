"""The line through a group's steps."""

from __future__ import annotations

import numpy as np
import pytest

from router.core.energy.step_fit import StepFit


def test_an_exact_line_is_found() -> None:
    fit = StepFit()
    for peak in range(10_000, 20_000, 50):
        fit.observe(peak, 5e-3 + 1e-7 * peak)
    found = fit.fitted()
    assert found is not None
    assert (found.base_s, found.per_token_s) == pytest.approx((5e-3, 1e-7))
    assert found.explained == pytest.approx(1)


def test_noise_leaves_the_slope_and_tells_what_it_explains() -> None:
    rng = np.random.default_rng(0)
    peaks = rng.integers(10_000, 60_000, 4000)
    fit = StepFit()
    for peak, noise in zip(peaks.tolist(), rng.normal(0, 1e-3, 4000), strict=True):
        fit.observe(peak, 5e-3 + 1e-7 * peak + noise)
    found = fit.fitted()
    assert found is not None
    assert found.per_token_s == pytest.approx(1e-7, rel=0.05)
    assert 0.5 < found.explained < 0.8


def test_what_is_older_fades() -> None:
    fit = StepFit()
    for slope in (3e-7, 1e-7):
        for peak in [10_000, 50_000] * 10_000:
            fit.observe(peak, 5e-3 + slope * peak)
    found = fit.fitted()
    assert found is not None
    assert found.per_token_s == pytest.approx(1e-7, rel=0.01)


@pytest.mark.parametrize("times", ["noise", "alike", "falling", "few", "none"])
def test_nothing_is_told_where_nothing_shows(times: str) -> None:
    rng = np.random.default_rng(1)
    fit = StepFit()
    for number in range({"few": 40, "none": 0}.get(times, 400)):
        peak = 10_000 if times == "alike" else 10_000 + 50 * (number % 100)
        step_s = {"noise": 5e-3 + rng.normal(0, 1e-3), "falling": 1 / peak}.get(times, 1e-7 * peak)
        fit.observe(peak, step_s)
    fit.observe(10_000, 0.0)
    assert fit.fitted() is None
