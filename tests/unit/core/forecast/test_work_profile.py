"""What a request costs from step to step."""

import numpy as np
import pytest

from router.core.forecast.forecast import WorkProfile
from tests.support.lookahead import column


def work(profile: WorkProfile, tokens: int, prefill_left: int, steps: int) -> list[float]:
    rows = profile.work(column([tokens]), column([prefill_left]), steps)
    assert rows.shape == (1, steps)
    return [float(each) for each in rows[0]]


def test_a_decode_gains_a_token_a_step() -> None:
    assert WorkProfile().plain
    assert work(WorkProfile(), 10, 0, 4) == [10, 11, 12, 13]


def test_a_prompt_counts_whole_whoever_computes_it() -> None:
    assert work(WorkProfile(), 10, 10, 3) == [10, 11, 12]


def test_constant_work_and_drafts() -> None:
    assert work(WorkProfile(growth=0), 10, 0, 3) == [10, 10, 10]
    assert work(WorkProfile(growth=2.5), 10, 0, 3) == [10, 12.5, 15]
    assert WorkProfile(growth=0).step_tokens == 1
    assert WorkProfile(growth=2.5).step_tokens == 2.5


def test_a_cost_per_request() -> None:
    assert work(WorkProfile(request_tokens=800), 10, 0, 2) == [810, 811]


def test_a_sliding_window_bounds_what_its_layers_attend_to() -> None:
    assert not WorkProfile(window=11).plain
    assert work(WorkProfile(window=11), 10, 0, 4) == [10, 11, 11, 11]
    assert work(WorkProfile(window=11, window_share=0.5), 10, 0, 4) == [10, 11, 11.5, 12]


def test_prefill_is_computed_in_chunks_and_its_last_yields_the_first_token() -> None:
    profile = WorkProfile(prefill_beta=2, prefill_chunk=4)
    assert not profile.plain
    assert work(profile, 10, 10, 5) == [10 + 8, 10 + 8, 10 + 4, 11, 12]
    assert work(profile, 10, 3, 3) == [10 + 6, 11, 12]
    assert work(profile, 10, 0, 2) == [10, 11]


def test_the_last_step_looked_at_has_what_is_left_of_a_prompt() -> None:
    profile = WorkProfile(prefill_beta=2, prefill_chunk=4)
    assert work(profile, 10, 10, 1) == [10 + 20]
    assert work(profile, 10, 10, 2) == [10 + 8, 10 + 12]


def test_steps_before_the_first_token() -> None:
    profile = WorkProfile(prefill_beta=2, prefill_chunk=4)
    assert profile.steps_before_first(column([0, 1, 4, 5, 8, 9])).tolist() == [0, 0, 0, 1, 1, 2]
    assert WorkProfile().steps_before_first(column([9])).tolist() == [0]


def test_nobody_at_all() -> None:
    nobody = np.zeros(0, dtype=np.int64)
    for profile in (WorkProfile(), WorkProfile(window=3)):
        assert profile.work(nobody, nobody, 3).shape == (0, 3)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"growth": -1}, "growth -1: give a number from 0 up"),
        ({"growth": float("nan")}, "growth nan"),
        ({"request_tokens": float("inf")}, "request_tokens inf"),
        ({"prefill_beta": -0.5}, "prefill_beta -0.5"),
        ({"window": 0}, "window 0: give 1 token or more, or none"),
        ({"window_share": 1.5}, "window_share 1.5: give a fraction from 0 to 1"),
        ({"prefill_chunk": 0}, "prefill_chunk 0: give 1 token or more"),
    ],
)
def test_impossible_profiles(values: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        WorkProfile(**values)  # type: ignore[arg-type]
