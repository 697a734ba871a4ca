"""What an admission policy may be told, and what is refused."""

from typing import Any

import pytest

from engine_patches.admission import ADMISSIONS, DEFAULT, make_admission, read_admission
from engine_patches.admission.settings import AdmissionError
from tests.support.admission import VARIANTS


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_policy_is_made_as_its_settings_say(variant: str) -> None:
    settings = read_admission(VARIANTS[variant])

    assert make_admission(settings).name == settings.policy
    assert ADMISSIONS[settings.policy].summary


def test_without_settings_it_is_the_default() -> None:
    assert read_admission({}).policy == DEFAULT
    assert read_admission({"headroom": 0.1}).headroom == 0.1
    assert read_admission({"headroom": 0.3, "adaptive": False}).headroom == 0.3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"policy": "headrom"},
            r"there is no policy 'headrom'; known: .*; did you mean headroom\?",
        ),
        ({"policy": "WAIT"}, r"there is no policy 'WAIT'; known: .*; did you mean wait\?"),
        ({"policy": 7}, "there is no policy 7; known: alpha_beta, headroom, "),
        ({"policy": ["wait"]}, r"there is no policy \['wait'\]; known: "),
        ({"policy": None}, "there is no policy None; known: "),
        ({"policy": "off", "headroom": 0.1}, "off has no key 'headroom'; known: policy$"),
        ({"policy": "memory_checked", "agein": 1}, r"did you mean ageing\?"),
        ({"headroom": 0.7}, "headroom 0.7 is not from 0 to 0.5: the nearest is 0.5"),
        ({"headroom": -1}, "headroom -1 is not from 0 to 0.5: the nearest is 0"),
        ({"headroom": 10**400}, "0 is not from 0 to 0.5: the nearest is 0.5"),
        ({"headroom": "5%"}, "headroom must be a number, got '5%'"),
        ({"headroom": True}, "headroom must be a number, got True"),
        ({"headroom": float("nan")}, "headroom must be a number, got nan"),
        ({"headroom": 0.3}, "headroom_max 0.25 is below headroom: give 0.3 or more"),
        ({"adaptive": 1}, "adaptive must be true or false, got 1"),
        ({"policy": "wait", "hold_s": 2}, "hold_s 2 is not from 0 to 1: the nearest is 1"),
        ({"policy": "wait", "thresholds": 3}, "thresholds must be a list of whole numbers, got 3"),
        ({"policy": "wait", "thresholds": [2, 0]}, "thresholds must be whole numbers from 1 to"),
        ({"policy": "wait", "segments": [1.5]}, "segments must be whole numbers from 1 to"),
        ({"policy": "wait", "segments": [9, 3, 9]}, r"segments must ascend: give \[3, 9\]"),
        (
            {"policy": "wait", "segments": [3, 9], "thresholds": [4, 2]},
            r"2 segments part 3 types, thresholds has 2: the nearest is \[4, 2, 2\]",
        ),
        (
            {"policy": "wait", "segments": [3], "thresholds": [4, 2, 1]},
            r"the nearest is \[4, 2\]",
        ),
        ({"policy": "wait", "thresholds": [10**400]}, "thresholds must be whole numbers from 1 to"),
        ({"policy": "nested_wait", "segments": [2 * 10**7]}, "segments must be whole numbers"),
        ({"policy": "memory_checked", "predict": "mean"}, "give hint, cap or quantile:Q"),
        ({"policy": "memory_checked", "predict": "quantile:1"}, "Q between 0 and 1"),
        ({"policy": "memory_checked", "predict": 0.5}, "predict 0.5: give hint"),
        (
            {"policy": "alpha_beta", "beta": 0},
            "beta 0 is not from 0.001 to 1: the nearest is 0.001",
        ),
    ],
)
def test_wrong_settings_are_refused_with_the_nearest_right_ones(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(AdmissionError, match=message):
        read_admission(given)


# Example 2 of arXiv 2504.11320 and a longer type: 4 and 1 requests a second, steps of 1 s and more.
WAIT: dict[str, Any] = {
    "policy": "wait",
    "rates": [4, 1],
    "lengths": [[1, 2], [2, 4]],
    "step_time": [1, 0.01],
}
# Section 6.1's four segments, and their rates in the ratios in which it has them.
NESTED: dict[str, Any] = {
    "policy": "nested_wait",
    "segments": [21, 41, 81],
    "rates": [20, 40, 80, 160],
}
STEP: dict[str, Any] = {
    "lengths": [[10, 21], [10, 41], [10, 81], [10, 161]],
    "step_time": [0.04, 1e-8],
}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        pytest.param(
            WAIT | {"thresholds": [4, 1]},
            r"thresholds \[4, 1\] are not valid: \(11\) step of full batch < n_1 / lambda_1: "
            r"1.26 against 1; .* n_2 / lambda_2: 1.26 against 1; .*: \[6, 2\]",
            id="wait",
        ),
        pytest.param(
            WAIT | {"thresholds": [5]}, r"\(11\) .* n_1 / .*: \[8, 5\]$", id="the last for all"
        ),
        pytest.param(
            WAIT | {"thresholds": [9, 3], "rates": [40, 10], "step_time": [1, 0.01]},
            "no greater ones are valid: the engine cannot sustain these rates",
            id="unstable",
        ),
        pytest.param(
            NESTED | {"thresholds": [15, 13, 13, 9]},
            r"not valid: \(12\) p_1 < n_2 / n_1: 0.933333 against 0.866667; .*: \[15, 15, 13, 9\]",
            id="nested_wait",
        ),
        pytest.param(
            NESTED | STEP | {"thresholds": [11, 11, 10, 7]},
            r"not valid: \(12\) step of full batch < n_1 / lambda: 0.0411481 against 0.0366667; "
            r"the nearest that are valid: \[13, 13, 12, 9\]",
            id="nested_wait, n_1",
        ),
    ],
)
def test_thresholds_that_are_not_valid_are_refused_with_the_nearest(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(AdmissionError, match=message):
        read_admission(given)


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        pytest.param(
            {"policy": "wait", "rates": [4], "lengths": [[1, 2]], "step_time": [1, 0]}
            | {"thresholds": [4]},
            [5],
            id="Example 2",
        ),
        pytest.param(NESTED | {"thresholds": [15, 14, 12, 8]}, [15, 15, 13, 9], id="section 6.1"),
        pytest.param(
            {
                "policy": "nested_wait",
                "segments": list(range(51, 452, 50)),
                "rates": [23, 11, 8, 7, 6, 4, 3, 2, 1, 1],
                "thresholds": [66, 43, 32, 24, 17, 11, 7, 4, 2, 1],
            },
            [66, 44, 33, 25, 18, 12, 8, 5, 3, 2],
            id="section 6.2",
        ),
    ],
)
def test_thresholds_on_the_edge_warn_and_the_nearest_do_not(
    given: dict[str, Any], nearest: list[int]
) -> None:
    listed = ", ".join(map(str, nearest))
    with pytest.warns(UserWarning, match=rf"on the edge, .*valid: \[{listed}\]$"):
        read_admission(given)

    assert read_admission(given | {"thresholds": nearest}).thresholds == tuple(nearest)


def test_valid_thresholds_are_taken() -> None:
    assert read_admission(WAIT | {"thresholds": [6, 2]}).lengths == ((1, 2), (2, 4))
    assert read_admission(WAIT | {"thresholds": [6, 2], "segments": [3]}).rates == (4, 1)
    assert read_admission(
        WAIT | {"thresholds": [9, 9], "segments": [1], "lengths": [[1, 1], [1, 2]]}
    )
    assert read_admission(NESTED | STEP | {"thresholds": [13, 13, 12, 9]}).thresholds


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (NESTED | {"rates": 3}, "rates must be a list of numbers, got 3"),
        (NESTED | {"rates": [1, 0]}, "rates must be numbers from 1e-09 to 1e.09, got 0"),
        (NESTED | {"rates": [1, True]}, "rates must be numbers .*, got True"),
        (NESTED | {"segments": []}, "give segments, and a rate for each"),
        (NESTED | {"rates": [1, 2]}, "give segments, and a rate for each"),
        (WAIT | {"segments": [3], "rates": [1, 2, 3]}, "give segments, and a rate for each"),
        (WAIT, "rates, lengths and step_time check thresholds: give all of these, or none"),
        (NESTED | STEP, "lengths and step_time check thresholds: give all of these, or none"),
        (WAIT | {"thresholds": [9], "lengths": []}, "give all of these"),
        (WAIT | {"thresholds": [9], "lengths": [[1, 2]]}, "1 lengths for 2 rates"),
        (WAIT | {"thresholds": [9, 9, 9]}, r"3 thresholds for 2 rates: the nearest is \[9, 9\]"),
        (WAIT | {"lengths": 5}, r"lengths must be a list of \[prompt, output\]"),
        (WAIT | {"lengths": [[1, 0]]}, "whole numbers from 1 to 1000000"),
        (WAIT | {"lengths": [[1]]}, "lengths must be"),
        (WAIT | {"lengths": [5]}, "lengths must be"),
        (WAIT | {"step_time": [0, 1]}, r"step_time must be \[d0, d1\]"),
        (WAIT | {"step_time": [1]}, r"step_time must be \[d0, d1\]"),
        (WAIT | {"step_time": [1, -1]}, "step_time must be numbers from 0 to"),
        (
            NESTED | STEP | {"segments": [21, 30, 81], "thresholds": [9] * 4},
            "41 output tokens are not above 21 and up to 30",
        ),
        ({"policy": "nested_wait", "delta": 2}, "delta 2 is not from 1e-06 to 0.9: the nearest"),
    ],
)
def test_what_is_told_of_the_requests_must_make_sense(given: dict[str, Any], message: str) -> None:
    with pytest.raises(AdmissionError, match=message):
        read_admission(given)
