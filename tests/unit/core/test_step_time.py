"""The cost of a step: its arithmetic and its text."""

import pytest

from router.core.errors import ConfigError
from router.core.step_time import StepTime


def test_a_step_is_linear_in_its_work_and_slower_at_half_the_speed() -> None:
    time = StepTime(1.0, 0.1, 0.01, 0.001)
    assert time.work_s(3, 2, 5) == pytest.approx(0.325)
    assert time.seconds(3, 2, 5) == pytest.approx(1.325)
    assert time.seconds(3, 2, speed=0.5) == pytest.approx(2.64)


def test_its_formula_leaves_out_what_costs_nothing() -> None:
    assert StepTime(5e-3, 9.5e-8, 0.0, 5e-5).formula == (
        "5 ms + 95 ns per KV token + 50 us per prompt token"
    )
    assert StepTime(5e-3, 0.0, 0.0, 3e-12).formula == "5 ms", "the rest of a fit"
    assert StepTime(0.0).formula == "0 ms", "as the lower end of an interval may be"


@pytest.mark.parametrize("text", ["0.005,1e-07", "0.005,1e-07,0,5e-05", "0.005,0,4e-05"])
def test_the_text_is_that_of_the_option(text: str) -> None:
    assert str(StepTime.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "1", "0,1", "1,-1", "1,2,3,4,5", "1,nan", "1,t_l", "1e7,0", "1,1e308"]
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--step-time takes"):
        StepTime.parse(text)
