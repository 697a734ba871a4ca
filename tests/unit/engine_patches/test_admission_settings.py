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
        ({"headroom": 0.7}, "headroom: Expected `float` <= 0.5"),
        ({"headroom": -1}, "headroom: Expected `float` >= 0.0"),
        ({"headroom": 10**400}, "headroom: "),
        ({"headroom": "5%"}, "headroom: Expected `float`, got `str`"),
        ({"headroom": True}, "headroom: Expected `float`, got `bool`"),
        ({"headroom": float("nan")}, "headroom: Expected `float`"),
        ({"headroom": 0.3}, "headroom_max 0.25 is below headroom: give 0.3 or more"),
        ({"adaptive": 1}, "adaptive: Expected `bool`, got `int`"),
        ({"policy": "wait", "hold_s": 2}, "hold_s: Expected `float` <= 1.0"),
        ({"policy": "wait", "thresholds": 3}, "thresholds: Expected `array`, got `int`"),
        ({"policy": "wait", "thresholds": [2, 0]}, r"thresholds\[\d\]: Expected `int` >= 1"),
        ({"policy": "wait", "segments": [1.5]}, r"segments\[\d\]: Expected `int`, got `float`"),
        ({"policy": "wait", "segments": [9, 3, 9]}, r"segments must ascend: give \[3, 9\]"),
        (
            {"policy": "wait", "segments": [3, 9], "thresholds": [4, 2]},
            r"2 segments part 3 types, thresholds has 2: the nearest is \[4, 2, 2\]",
        ),
        (
            {"policy": "wait", "segments": [3], "thresholds": [4, 2, 1]},
            r"the nearest is \[4, 2\]",
        ),
        ({"policy": "wait", "thresholds": [10**400]}, "thresholds"),
        (
            {"policy": "nested_wait", "segments": [2 * 10**7]},
            r"segments\[\d\]: Expected `int` <= 1000000",
        ),
        ({"policy": "memory_checked", "predict": "mean"}, "give hint, cap or quantile:Q"),
        ({"policy": "memory_checked", "predict": "quantile:1"}, "Q between 0 and 1"),
        ({"policy": "memory_checked", "predict": 0.5}, "predict: Expected `str`, got `float`"),
        (
            {"policy": "alpha_beta", "beta": 0},
            "beta: Expected `float` >= 0.001",
        ),
    ],
)
def test_wrong_settings_are_refused_with_the_nearest_right_ones(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(AdmissionError, match=message):
        read_admission(given)


NESTED: dict[str, Any] = {"policy": "nested_wait", "segments": [21, 41], "rates": [20, 40, 80]}


def test_the_shares_of_segments_are_taken() -> None:
    assert read_admission(NESTED).rates == (20, 40, 80)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (NESTED | {"rates": 3}, "rates: Expected `array`, got `int`"),
        (NESTED | {"rates": [1, 0]}, r"rates\[\d\]: Expected `float` >= 1e-09"),
        (NESTED | {"rates": [1, True]}, r"rates\[\d\]: Expected `float`, got `bool`"),
        (NESTED | {"segments": []}, "give segments, and a rate for each"),
        (NESTED | {"rates": [1, 2]}, "give segments, and a rate for each"),
        ({"policy": "nested_wait", "delta": 2}, "delta: Expected `float` <= 0.9"),
    ],
)
def test_what_is_told_of_the_requests_must_make_sense(given: dict[str, Any], message: str) -> None:
    with pytest.raises(AdmissionError, match=message):
        read_admission(given)
