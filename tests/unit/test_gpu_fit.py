"""The fit of measured step times, on times made by the model itself."""

from __future__ import annotations

import pytest

from loadgen.step_model import StepTime
from tests.gpu.fit import Point, fit


def points(cost: StepTime, noise_s: float = 0.0) -> list[Point]:
    sizes = [(batch, batch * context) for batch in (1, 8, 32) for context in (100, 900, 3000)]
    return [
        Point(batch, load, cost.seconds(load, batch) + noise_s * (-1) ** number, 50)
        for number, (batch, load) in enumerate(sizes)
    ]


@pytest.mark.parametrize("cost", [StepTime(5e-3, 9e-8, 2e-5), StepTime(5e-3, 9e-8, 0.0)])
def test_the_cost_is_found_again(cost: StepTime) -> None:
    found = fit(points(cost))
    assert found["base_s"] == pytest.approx(cost.base_s, rel=1e-6)
    assert found["per_token_s"] == pytest.approx(cost.per_token_s, rel=1e-6, abs=1e-15)
    assert found["per_request_s"] == pytest.approx(cost.per_request_s, rel=1e-6, abs=1e-12)
    assert found["r_squared"] == pytest.approx(1)
    assert found["largest_relative_error"] < 1e-6


def test_noise_makes_no_cost_negative() -> None:
    found = fit(points(StepTime(5e-3, 0.0, 0.0), noise_s=1e-4))
    assert found["base_s"] == pytest.approx(5e-3, rel=0.05)
    assert min(found["per_token_s"], found["per_request_s"]) >= 0
    assert found["largest_relative_error"] > 0.001


def test_too_few_points() -> None:
    with pytest.raises(ValueError, match="to 2 points"):
        fit(points(StepTime())[:2])


def test_what_the_simulator_cannot_read_is_not_fitted() -> None:
    found = fit(points(StepTime(5e-3, 0.0, 2e-5)))
    assert found["base_s"] > 0
    assert found["per_token_s"] > 0 or found["per_request_s"] == 0


def test_every_fit_has_a_fixed_cost() -> None:
    found = fit([Point(1, 1000 * n, 0.001 * n - 0.0005, 9) for n in (1, 2, 3)])
    assert (found["base_s"], found["per_token_s"]) == (pytest.approx(0.0015), 0)
