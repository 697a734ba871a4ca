"""The work profile as a group's steps show it."""

from dataclasses import replace

import pytest

from router.core.forecast.forecast import DEFAULT_CHUNK, WorkProfile
from router.core.forecast.learned_profile import PROMPT_RATIO, Shown, learned
from router.core.step_fit import NUMBERS, FittedStepTime
from router.core.step_time import StepTime

NOTHING = Shown()
PLAIN = WorkProfile()


def fitted(
    token_s: float, request_s: float, prompt_s: float, error: float = 0.01, token_error: float = 0.0
) -> FittedStepTime:
    """Numbers with relative errors; those of KV tokens may be of another size."""
    numbers = (5e-3, token_s, request_s, prompt_s)
    errors = (error, token_error or error, error, error)
    around = zip(numbers, errors, strict=True)
    intervals = tuple((max(0.0, n - e * abs(n)), n + e * abs(n)) for n, e in around)
    return FittedStepTime(*numbers, intervals=intervals)


def test_while_the_cost_is_unknown_the_profile_stays() -> None:
    assert learned(PLAIN, None, NOTHING) == PLAIN
    known = replace(PLAIN, prefill_beta=9.0)
    assert learned(known, None, NOTHING) == known


def test_prompts_cost_something_where_they_are_cached() -> None:
    """Until a cost is fixed, or learned from steps with prompts."""
    caches = Shown(prompts=True)
    unsaid = fitted(1e-7, 4e-5, 0.0)
    assert learned(PLAIN, None, caches).prefill_beta == PROMPT_RATIO
    assert learned(PLAIN, unsaid, caches).prefill_beta == PROMPT_RATIO
    told = replace(unsaid, known=NUMBERS)
    assert learned(PLAIN, told, caches).prefill_beta == 0
    assert learned(PLAIN, StepTime(5e-3, 1e-7), caches).prefill_beta == 0
    dear = learned(learned(PLAIN, None, caches), fitted(1e-7, 4e-5, 1e-4), caches)
    assert dear.prefill_beta == pytest.approx(1000)


def test_costs_count_in_kv_tokens() -> None:
    found = learned(PLAIN, fitted(1e-7, 4e-5, 1e-5), NOTHING)
    assert found.request_tokens == pytest.approx(400)
    assert found.prefill_beta == pytest.approx(100)


def test_a_configured_cost_is_certain() -> None:
    found = learned(PLAIN, StepTime(5e-3, 1e-7, 4e-5, 1e-5), NOTHING)
    assert (found.request_tokens, found.prefill_beta) == pytest.approx((400, 100))
    assert learned(PLAIN, StepTime(5e-3, 1e-7), NOTHING) == PLAIN


def test_a_cost_that_may_be_none_counts_nothing() -> None:
    assert learned(PLAIN, fitted(1e-7, 4e-5, 1e-5, error=1.5, token_error=0.1), NOTHING) == PLAIN


def test_a_cost_too_small_to_decide_counts_nothing() -> None:
    """Where no prompts are computed decisions stay as they were, to the last bit."""
    assert learned(PLAIN, fitted(1e-7, 5e-8, 5e-9), NOTHING) == PLAIN


def test_where_kv_tokens_cost_too_little_to_be_seen_prompts_decide() -> None:
    """They count as the most that they may cost; with evidence that falls."""
    few = learned(PLAIN, fitted(1e-9, 0.0, 1e-5, token_error=99.0), NOTHING)
    assert few.prefill_beta == pytest.approx(1e-5 / 1e-7)
    more = learned(few, fitted(1e-9, 0.0, 1e-5, token_error=9.0), NOTHING)
    assert more.prefill_beta == pytest.approx(1e-5 / 1e-8)
    nothing = FittedStepTime(
        5e-3, 0.0, 0.0, 1e-5, intervals=((5e-3, 5e-3), (0, 0), (0, 0), (1e-5, 1e-5))
    )
    assert learned(more, nothing, NOTHING).prefill_beta == pytest.approx(1e5), "the most there is"
    assert learned(PLAIN, StepTime(5e-3, 0.0, 0.0, 1e-5), NOTHING).prefill_beta == 1e5


@pytest.mark.parametrize("token_s", [0.0, 1e-11])
@pytest.mark.parametrize("costs", [(1e-3, 5e-6), (5e-6, 1e-3)])
def test_one_unit_serves_requests_and_prompts(token_s: float, costs: tuple[float, float]) -> None:
    """The dearer one counts the most there is, and the other one in proportion."""
    found = learned(PLAIN, StepTime(5e-3, token_s, *costs), NOTHING)
    ratios = found.request_tokens, found.prefill_beta
    assert max(ratios) == pytest.approx(1e5)
    assert ratios[0] / ratios[1] == pytest.approx(costs[0] / costs[1])


def test_noise_changes_nothing() -> None:
    before = learned(PLAIN, fitted(1e-7, 4e-5, 1e-5), NOTHING)
    assert learned(before, fitted(1e-7, 4.1e-5, 1.03e-5), NOTHING) == before, "5 % are too little"
    assert learned(before, fitted(1e-7, 5e-5, 1.3e-5, error=0.5), NOTHING) == before, "uncertain"
    after = learned(before, fitted(1e-7, 4e-5, 1.3e-5), NOTHING)
    assert after.prefill_beta == pytest.approx(130)
    assert replace(after, prefill_beta=before.prefill_beta) == before


def test_growth_chunks_and_windows_are_as_engines_show_them() -> None:
    found = learned(PLAIN, None, Shown(2.5, 512, 1024, 0.8))
    assert found == WorkProfile(2.5, 1024, 0.8, prefill_chunk=512)
    assert learned(found, None, Shown(2.55, 512, 1024, 0.8)) == found
    assert learned(found, None, NOTHING) == WorkProfile(prefill_chunk=DEFAULT_CHUNK)
