"""The fits of what a GPU is measured by, on figures made by the models themselves."""

import math

import pytest

from loadgen.model.power_model import PowerModel
from router.core.step_time import PAPER_STEP_TIME, StepTime
from tests.gpu.fit import Point, fit_decode, fit_power, fit_prompts

DECODE = {"base_s": 5e-3, "per_token_s": 9e-8, "per_request_s": 2e-5}
SIZES = (256, 1024, 4096, 8192)


def points(cost: StepTime, noise_s: float = 0.0) -> dict[str, Point]:
    sizes = [(batch, batch * context) for batch in (1, 8, 32) for context in (100, 900, 3000)]
    return {
        f"{batch} with {load}": Point(
            batch, load, cost.seconds(load, batch) + noise_s * (-1) ** number, 50
        )
        for number, (batch, load) in enumerate(sizes)
    }


def chunks(per_prompt_token_s: float, mixing_s: float = 0.0) -> dict[str, Point]:
    """Prompts alone, and beside 32 requests, which cost so much more than what they compute."""
    time = StepTime(**DECODE)
    return {
        f"{tokens} beside {batch}": Point(
            batch + 1,
            tokens + batch * 1000,
            time.seconds(tokens + batch * 1000, batch + 1)
            + per_prompt_token_s * tokens
            + mixing_s * (batch > 0),
            6,
            prompt_tokens=tokens,
        )
        for tokens in SIZES
        for batch in (0, 32)
    }


@pytest.mark.parametrize("cost", [StepTime(5e-3, 9e-8, 2e-5), StepTime(5e-3, 9e-8, 0.0)])
def test_the_cost_is_found_again(cost: StepTime) -> None:
    found = fit_decode(points(cost))
    assert found["base_s"] == pytest.approx(cost.base_s, rel=1e-6)
    assert found["per_token_s"] == pytest.approx(cost.per_token_s, rel=1e-6, abs=1e-15)
    assert found["per_request_s"] == pytest.approx(cost.per_request_s, rel=1e-6, abs=1e-12)
    assert found["r_squared"] == pytest.approx(1)
    assert found["largest_relative_error"] < 1e-6


def test_noise_makes_no_cost_negative() -> None:
    found = fit_decode(points(StepTime(5e-3, 0.0, 0.0), noise_s=1e-4))
    assert found["base_s"] == pytest.approx(5e-3, rel=0.05)
    assert min(found["per_token_s"], found["per_request_s"]) >= 0
    assert found["largest_relative_error"] > 0.001


def test_a_residual_is_what_the_fit_is_too_high_by() -> None:
    measured = points(StepTime(5e-3, 0.0, 0.0))
    name = "8 with 800"
    measured[name] = Point(8, 800, 4e-3, 50)
    found = fit_decode(measured)
    assert found["residuals"].keys() == measured.keys()
    assert found["residuals"][name] == found["largest_relative_error"]
    assert 0.15 < found["residuals"][name] < 0.25
    assert sum(found["residuals"].values()) < found["residuals"][name]


def test_too_few_points() -> None:
    few = dict(list(points(PAPER_STEP_TIME).items())[:2])
    with pytest.raises(ValueError, match="to 2 points"):
        fit_decode(few)


def test_what_the_simulator_cannot_read_is_not_fitted() -> None:
    found = fit_decode(points(StepTime(5e-3, 0.0, 2e-5)))
    assert found["base_s"] > 0
    assert found["per_token_s"] > 0 or found["per_request_s"] == 0


def test_every_fit_has_a_fixed_cost() -> None:
    found = fit_decode({str(n): Point(1, 1000 * n, 0.001 * n - 0.0005, 9) for n in (1, 2, 3)})
    assert (found["base_s"], found["per_token_s"]) == (pytest.approx(0.0015), 0)


def test_the_cost_of_a_prompt_token_is_found_again() -> None:
    found = fit_prompts(chunks(4e-5), DECODE)
    assert found["per_prompt_token_s"] == pytest.approx(4e-5)
    assert found["largest_relative_error"] < 1e-9
    for kind, batch in (("alone", 0), ("mixed", 32)):
        line = found[kind]
        # Its own tokens are resident as well.
        assert line["per_prompt_token_s"] == pytest.approx(4e-5 + 9e-8)
        base_s = 5e-3 + 9e-8 * batch * 1000 + 2e-5 * (batch + 1)
        assert line["base_s"] == pytest.approx(base_s)
        assert line["residuals"].keys() == {f"{tokens} beside {batch}" for tokens in SIZES}


def test_what_mixing_costs_is_seen() -> None:
    found = fit_prompts(chunks(4e-5, mixing_s=0.02), DECODE)
    assert found["mixed"]["base_s"] - found["alone"]["base_s"] == pytest.approx(
        0.02 + 32 * (9e-8 * 1000 + 2e-5)
    )
    assert found["residuals"]["256 beside 32"] < -0.3
    assert found["alone"]["largest_relative_error"] < 1e-9


def test_prompts_that_cost_nothing_have_no_cost_below_zero() -> None:
    measured = {name: each for name, each in chunks(-1e-7).items() if each.requests == 1}
    found = fit_prompts(measured, DECODE)
    assert (found["per_prompt_token_s"], found["mixed"]) == (0.0, None)


@pytest.mark.parametrize("model", [PowerModel(), PowerModel(90.0, 700.0, 0.4)])
def test_the_power_model_is_found_again(model: PowerModel) -> None:
    measured = {
        str(load): Point(8, load, 0.01, 50, model.watts(load / 96_000))
        for load in (1000, 8000, 32_000, 96_000)
    }
    measured["not told"] = Point(8, 5000, 0.01, 50)
    found = fit_power(measured, model.idle_w)
    assert found is not None
    assert found["max_w"] == pytest.approx(model.max_w)
    assert found["exponent"] == pytest.approx(model.exponent)
    assert found["largest_relative_error"] < 1e-9
    assert "not told" not in found["residuals"]


def test_power_that_does_not_follow_the_load_is_fitted_without_it() -> None:
    watts = {1000: 400.0, 8000: 350.0, 32_000: 300.0}
    measured = {str(load): Point(8, load, 0.01, 50, w) for load, w in watts.items()}
    found = fit_power(measured, 100.0)
    assert found is not None
    assert found["exponent"] == 0
    assert math.isclose(found["largest_relative_error"], max(map(abs, found["residuals"].values())))
    assert found["largest_relative_error"] > 0.1
    # Above idle 300, 250 and 200 W: what is fitted to all of them lies between.
    assert found["max_w"] == pytest.approx(100 + (300 * 250 * 200) ** (1 / 3))


def test_power_takes_two_points_above_idle() -> None:
    assert (
        fit_power({"a": Point(1, 10, 0.01, 5, 300.0), "b": Point(1, 9, 0.01, 5, 80.0)}, 90) is None
    )
