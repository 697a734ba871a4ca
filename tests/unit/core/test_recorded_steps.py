"""The fit on the steps of a real vLLM with a trained model, as they were recorded."""

from statistics import median

import numpy as np
import pytest

from router.core.step_fit import NUMBERS
from tests.support.engine_steps import judged, recorded

STEPS = recorded().steps
REPORT = judged(STEPS)


def test_the_four_numbers_explain_how_steps_vary() -> None:
    assert REPORT.explained >= 0.9
    assert REPORT.by_tokens < 0.1


def hindsight(kind: str) -> float:
    """The median error of four numbers that know all steps: it is the recording's own."""
    work = [[1, step.load_tokens, step.running, step.prompt_tokens] for step in STEPS]
    relative = np.array(work) / np.array([[step.step_s] for step in STEPS])
    numbers, *_ = np.linalg.lstsq(relative, np.ones(len(STEPS)), rcond=None)
    errors: list[float] = np.abs(relative @ numbers - 1).tolist()
    return median(error for error, step in zip(errors, STEPS, strict=True) if step.kind == kind)


@pytest.mark.parametrize("kind", ["decode", "prompts"])
def test_the_next_step_is_predicted_nearly_as_well_as_in_hindsight(kind: str) -> None:
    assert REPORT.errors[kind] <= 1.75 * hindsight(kind)


def test_a_prompt_token_costs_many_resident_ones() -> None:
    fitted = REPORT.fitted
    low, high = fitted.intervals[NUMBERS.index("per_prompt_token_s")]
    assert high - low < 0.2 * fitted.per_prompt_token_s
    assert fitted.per_prompt_token_s > 50 * fitted.per_token_s
