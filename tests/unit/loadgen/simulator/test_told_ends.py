"""What a trained model's engine reported of its answers, and a router that reads it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadgen.simulator.decode.oracle import Foreseen
from router.core.forecast.end_signals import ReportedSignal
from router.core.forecast.forecast import NO_CAP
from tests.support import told_ends
from tests.support.recorded_ends import MOST_TOKENS, Answers, reported
from tests.support.told_ends import Telling, gains

DATA = Path(__file__).resolve().parents[3] / "data"
PROMPTS = DATA / "prompts/prompts.jsonl.gz"


@pytest.fixture(scope="module")
def answers() -> Answers:
    return Answers.load(DATA / "end_signal/recorded.npz", PROMPTS)


def test_an_answer_has_a_probability_for_each_of_its_tokens(answers: Answers) -> None:
    assert len(answers.tokens) == len(answers.stopped) == len(set(answers.prompts)) > 400
    assert len(answers.told) == len(answers.raw) == answers.tokens.sum()
    assert answers.tokens.max() == MOST_TOKENS
    assert (answers.tokens[~answers.stopped] == MOST_TOKENS).all()
    # Sampled: an end token that was taken was likelier there than elsewhere.
    lasts = answers.raw[(answers.starts + answers.tokens - 1)[answers.stopped]]
    assert np.median(lasts) > 100 * np.median(answers.raw)


def test_a_probability_is_told_again_once_it_has_changed_by_half_and_by_enough() -> None:
    averages = [1e-5, 4e-4, 6e-4, 8e-4, 1.2e-3, 0.01, 0.0149, 0.0051, 0.0049]
    told = [1e-5, 1e-5, 6e-4, 6e-4, 1.2e-3, 0.01, 0.01, 0.01, 0.0049]
    assert reported(averages) == told


def test_what_is_kept_is_read_again(answers: Answers, tmp_path: Path) -> None:
    answers.write(tmp_path / "again.npz", PROMPTS)
    again = Answers.load(tmp_path / "again.npz", PROMPTS)
    assert again.prompts == answers.prompts
    for name in ("prompt_tokens", "tokens", "stopped", "told", "raw"):
        assert (getattr(again, name) == getattr(answers, name)).all()


def test_a_request_reports_what_its_answer_did(answers: Answers) -> None:
    chosen, made = int(np.argmax(answers.tokens * answers.stopped)), np.arange(4)
    tokens = int(answers.tokens[chosen])
    ones = np.ones(4, dtype=np.int64)
    running = Foreseen(
        id=np.arange(4),
        worker=0 * ones,
        prompt_tokens=answers.prompt_tokens[chosen] * ones,
        generated_tokens=made,
        max_tokens=NO_CAP * ones,
        end_probability=np.full(4, np.nan),
        prefill_left=0 * ones,
        from_tokens=0 * ones,
        remaining=tokens - made,
        held_tokens=made,
    )
    start = answers.starts[chosen]
    told = replace(
        running, end_probability=np.array([np.nan, *answers.told[start : start + 3].tolist()])
    )
    found = Telling(answers, ReportedSignal()).chances(running, np.array([[16]]))
    assert found == pytest.approx(ReportedSignal().chances(told, np.array([[16]])))


def test_runs_are_compared_with_those_of_no_look_ahead(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    small: dict[str, Any] = {"workers": 4, "slots": 16, "steps": 900, "warmup": 100}
    monkeypatch.setattr(told_ends, "SIZES", small)
    shown = {way: told_ends.WAYS[way] for way in ("none", "auto", "oracle")}
    monkeypatch.setattr(told_ends, "WAYS", shown)
    ways = gains(answers, 1)["ways"]
    assert ways["none"]["imbalance"] == ways["none"]["tokens_per_s"] == [1.0, 1.0, 1.0]
    assert ways["oracle"]["skills"] == [1.0]
    assert ways["oracle"]["horizons"][0] > 0
    assert ways["oracle"]["imbalance"] != [1.0, 1.0, 1.0]
    assert 0 < ways["auto"]["skills"][0] < 1
