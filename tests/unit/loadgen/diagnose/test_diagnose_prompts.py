"""What a diagnosis says of workers that compute prompts."""

from dataclasses import replace

import numpy as np
import pytest

from loadgen.diagnose.analysis.window import Span, window_of
from loadgen.diagnose.diagnosis import Diagnosis, diagnose_window
from loadgen.diagnose.words import answers
from loadgen.simulator.serving.serving_simulation import simulate_serving
from router.core.step_time import StepTime
from router.core.types import Dispatch
from tests.support.recorded import recorded_with_prompts, with_prompts

WORST = ("fcfs", Dispatch.POOL)
# With dear prompts and a policy that sees none of them a switch wins more than chance in 850 steps.
UNEVEN = ("round_robin", Dispatch.INSTANT)
DEAR = StepTime(2e-3, 2e-7, 1e-5, 4e-5)


@pytest.fixture(scope="module")
def diagnosis() -> Diagnosis:
    whole = recorded_with_prompts(with_prompts(*WORST))
    return diagnose_window(window_of(whole, Span()), policies=())


@pytest.fixture(scope="module")
def uneven() -> Diagnosis:
    whole = recorded_with_prompts(replace(with_prompts(*UNEVEN), step_time=DEAR))
    return diagnose_window(window_of(whole, Span()), policies=("least_prefill", "bfio"))


def test_the_fit_finds_what_prompts_cost(diagnosis: Diagnosis) -> None:
    fitted, true = diagnosis.found.barrier.fitted, with_prompts(*WORST).step_time
    assert fitted is not None
    assert fitted.per_prompt_token_s == pytest.approx(true.per_prompt_token_s, rel=0.01)
    assert fitted.per_token_s == pytest.approx(true.per_token_s, rel=0.05)
    assert fitted.explained > 0.99


def test_waiting_is_split_into_what_decode_and_prompts_cost(diagnosis: Diagnosis) -> None:
    waiting = diagnosis.found.waiting
    records = simulate_serving(with_prompts(*WORST), keep_records=True).records
    assert records is not None
    waited_s = records.seconds[:, None] - records.needed_s
    idle_share = float(waited_s.sum()) / (4 * float(records.seconds.sum()))
    assert waiting.idle_share == pytest.approx(idle_share, rel=0.02)
    assert waiting.decode_share is not None
    assert waiting.prompt_share is not None
    assert waiting.decode_share + waiting.prompt_share == pytest.approx(idle_share, rel=0.02)
    assert 0.05 < waiting.decode_share < waiting.prompt_share
    assert waiting.throughput_tok_s == pytest.approx(
        float(records.tokens.sum() / records.seconds.sum())
    )
    said = dict(answers(diagnosis))["How much is waiting?"]
    assert "prompts, which some workers compute while the others wait, add" in said


@pytest.mark.parametrize(("policy", "least_gain"), [("least_prefill", 0.0), ("bfio", 0.15)])
def test_a_switch_wins_what_was_predicted(
    policy: str, least_gain: float, uneven: Diagnosis
) -> None:
    assert uneven.prospects is not None
    row = uneven.prospects.of(policy)
    assert row is not None
    now = uneven.found.waiting
    config = replace(with_prompts(policy, row.dispatch), step_time=DEAR)
    records = simulate_serving(config, keep_records=True).records
    assert records is not None
    then_tok_s = float(records.tokens.sum() / records.seconds.sum())
    measured, predicted = (
        tok_s / now.throughput_tok_s - 1 for tok_s in (then_tok_s, row.predicted.throughput_tok_s)
    )
    assert measured > least_gain
    # Equal costs are decided by rounding, which differs by processor, so runs part: of six traces
    # bfio's gain was predicted 2 % less to 26 % more than it was.
    assert predicted == pytest.approx(measured, rel=0.35, abs=0.002)
    waited_s = records.seconds[:, None] - records.needed_s
    idle_share = float(waited_s.sum()) / (4 * float(records.seconds.sum()))
    assert now.idle_share is not None
    won, promised = (now.idle_share - share for share in (idle_share, row.predicted.idle_share))
    assert won > least_gain
    assert promised == pytest.approx(won, rel=0.15, abs=0.002)


def test_cached_parts_of_prompts_are_not_computed_in_the_simulation_either() -> None:
    # Tokens cost nothing here: the recording was made with half as many as it says.
    config = replace(with_prompts(*WORST, cached=0.5), step_time=StepTime(2e-3, 0.0, 1e-5, 1e-5))
    window = window_of(recorded_with_prompts(config, cached=0.5), Span())
    # The recording lists the requests that ended, and has the steps of a few more.
    assert window.computed_share == pytest.approx(0.5, rel=0.1)
    half = diagnose_window(window, policies=())
    error = half.simulation_error
    assert error is not None
    assert abs(error["throughput_tok_s"]) < 0.05


def test_prompts_computed_elsewhere_leave_the_decode_steps_alone(diagnosis: Diagnosis) -> None:
    whole = recorded_with_prompts(with_prompts(*WORST))
    window = window_of(whole, Span())
    elsewhere = replace(window, prompts=np.zeros_like(window.prompts))
    assert elsewhere.computed_share == 0
    found = diagnose_window(elsewhere, policies=()).found
    assert found.waiting.prompt_share in (None, 0.0)
