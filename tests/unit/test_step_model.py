"""A step time on the command line: numbers, or the file of a measurement."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.step_model import StepTime, load_step_time
from router.errors import ConfigError, InputError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "fit.json"


def test_numbers() -> None:
    assert load_step_time("0.01,1e-7,1e-5") == StepTime(0.01, 1e-7, 1e-5)


def test_a_measurement_with_its_conditions(file: Path) -> None:
    file.write_text('{"command": "…", "base_s": 0.01, "per_token_s": 1e-7, "per_request_s": 1e-5}')
    assert load_step_time(str(file)) == StepTime(0.01, 1e-7, 1e-5)


def test_a_measurement_without_a_cost_per_request(file: Path) -> None:
    file.write_text('{"base_s": 1, "per_token_s": 0}')
    assert load_step_time(str(file)) == StepTime(1.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("C,t_l", "cannot be read as JSON"),
        ("[1, 2]", "is no JSON object with base_s and per_token_s"),
        ('{"base_s": 1}', "per_token_s in .* a number of seconds from 0 up, got null"),
        ('{"base_s": true, "per_token_s": 1}', "base_s in .* got true"),
        ('{"base_s": "1", "per_token_s": 1}', 'base_s in .* got "1"'),
        ('{"base_s": 1, "per_token_s": -1}', "per_token_s in .* got -1"),
        ('{"base_s": 1, "per_token_s": NaN}', "per_token_s in .* got NaN"),
        ('{"base_s": 1, "per_token_s": 1, "per_request_s": Infinity}', "per_request_s in"),
        ('{"base_s": 0, "per_token_s": 1}', "base_s in .* must be above 0"),
    ],
)
def test_a_file_that_is_no_measurement(file: Path, text: str, problem: str) -> None:
    file.write_text(text)
    with pytest.raises(InputError, match=f"--step-time: .*{problem}"):
        load_step_time(str(file))


def test_a_file_that_is_not_text(file: Path) -> None:
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="cannot be read as JSON"):
        load_step_time(str(file))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("/nonexistent/fit.json", "there is no file /nonexistent/fit.json"),
        ("a\0b", "takes numbers separated by commas"),
        ("a" * 300, "takes numbers separated by commas"),
    ],
)
def test_neither_numbers_nor_a_file(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_step_time(text)
