"""The fit on the steps of a real vLLM with a trained model, as they were recorded."""

import pytest

from router.core.step_fit import NUMBERS
from tests.support.engine_steps import judged, recorded

REPORT = judged(recorded().steps)


def test_the_four_numbers_explain_how_steps_vary() -> None:
    assert REPORT.explained >= 0.9
    assert REPORT.by_tokens < 0.1


@pytest.mark.parametrize("kind", ["decode", "prompts"])
def test_the_next_step_is_predicted(kind: str) -> None:
    assert REPORT.errors[kind] <= 0.15


def test_a_prompt_token_costs_many_resident_ones() -> None:
    fitted = REPORT.fitted
    low, high = fitted.intervals[NUMBERS.index("per_prompt_token_s")]
    assert high - low < 0.2 * fitted.per_prompt_token_s
    assert fitted.per_prompt_token_s > 50 * fitted.per_token_s
