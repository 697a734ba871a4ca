"""Whether a request met its targets, or what made it miss them."""

import math

import pytest

from router.core.errors import ConfigError
from router.core.targets import Targets

BOTH = Targets(1.0, 0.05)


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.inf, math.nan])
def test_targets_are_times(wrong: float) -> None:
    with pytest.raises(ConfigError, match="target_tpot takes seconds above 0"):
        Targets(1.0, wrong)


@pytest.mark.parametrize(
    ("targets", "queued_s", "ttft_s", "tpot_s", "expected"),
    [
        (BOTH, 0.9, 1.0, 0.05, "met"),
        (BOTH, 0.9, 1.0, None, "met"),
        (BOTH, 0.5, 1.5, 0.01, "queue"),
        (BOTH, 0.4, 1.5, 0.01, "prompt"),
        (BOTH, 0.5, 1.0, 0.06, "tokens"),
        (Targets(tpot_s=0.05), 0.5, 9.0, 0.05, "met"),
        (Targets(tpot_s=0.05), 0.5, 9.0, 0.06, "tokens"),
        (Targets(1.0), 0.0, 1.0, 9.0, "met"),
    ],
)
def test_a_stream_is_judged_by_both_its_times(
    targets: Targets, queued_s: float, ttft_s: float, tpot_s: float | None, expected: str
) -> None:
    assert targets.verdict(queued_s, ttft_s, tpot_s) == expected


@pytest.mark.parametrize(
    ("targets", "queued_s", "took_s", "expected"),
    [
        (BOTH, 0.5, 1.5, "met"),  # 1 s, and 0.05 s for each of ten more tokens
        (BOTH, 0.5, 2.0, "queue"),
        (BOTH, 0.4, 2.0, "tokens"),
        (Targets(1.0), 0.5, 2.0, None),
        (Targets(tpot_s=0.05), 0.5, 2.0, None),
    ],
)
def test_an_answer_that_comes_whole_is_judged_by_its_last_token(
    targets: Targets, queued_s: float, took_s: float, expected: str | None
) -> None:
    assert targets.verdict_whole(queued_s, took_s, 11) == expected
