"""A step time on the command line: numbers, or the file of a measurement."""

from pathlib import Path

import pytest

from loadgen.model.measured_step_time import load_step_time
from router.core.errors import ConfigError, InputError
from router.core.step_time import StepTime


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "fit.json"


def test_numbers() -> None:
    assert load_step_time("0.01,1e-7,1e-5") == StepTime(0.01, 1e-7, 1e-5)
    assert load_step_time("0.01,1e-7,1e-5,2e-5") == StepTime(0.01, 1e-7, 1e-5, 2e-5)


def test_a_measurement_with_its_conditions(file: Path) -> None:
    file.write_text('{"measured": 1, "base_s": 0.01, "per_token_s": 1e-7, "per_request_s": 1e-5}')
    assert load_step_time(str(file)) == StepTime(0.01, 1e-7, 1e-5)


def test_a_measurement_without_a_cost_per_request(file: Path) -> None:
    file.write_text('{"base_s": 1, "per_token_s": 0}')
    assert load_step_time(str(file)) == StepTime(1.0, 0.0, 0.0)


def test_a_measurement_with_a_cost_per_prompt_token(file: Path) -> None:
    file.write_text('{"base_s": 1, "per_token_s": 0, "per_prompt_token_s": 2e-5}')
    assert load_step_time(str(file)) == StepTime(1.0, per_prompt_token_s=2e-5)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("C,t_l", "cannot be read as JSON"),
        ("[1, 2]", "is no JSON object with base_s and per_token_s"),
        ('{"base_s": 1}', "per_token_s in .* a number of seconds from 0 to 1e\\+06, got null"),
        ('{"base_s": true, "per_token_s": 1}', "base_s in .* got true"),
        ('{"base_s": "1", "per_token_s": 1}', 'base_s in .* got "1"'),
        ('{"base_s": 1, "per_token_s": -1}', "per_token_s in .* got -1"),
        ('{"base_s": 1, "per_token_s": NaN}', "per_token_s in .* got NaN"),
        ('{"base_s": 1, "per_token_s": 1, "per_request_s": Infinity}', "per_request_s in"),
        (f'{{"base_s": 1{400 * "0"}, "per_token_s": 1}}', "base_s in .* got 1000"),
        ('{"base_s": 0, "per_token_s": 1}', "base_s in .* must be above 0"),
        ('{"base_s": 1, "per_token_s": 1, "per_request": 1}', "has per_request, which means "),
        ('{"t_l": 1, "C": 1, "measured": {}}', "has C, t_l, which mean nothing"),
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


@pytest.mark.parametrize("text", ["/nonexistent/fit.json", "fit", "fit,2", "", "a\0b", "a" * 300])
def test_neither_numbers_nor_a_file(text: str) -> None:
    with pytest.raises(ConfigError, match="is no file that is there, and not C,t_l") as error:
        load_step_time(text)
    assert repr(text) in str(error.value)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no file"):
        load_step_time(str(tmp_path))


@pytest.mark.parametrize("text", ["1", "0,1", "1,2,3,4,5", "1,t_l"])
def test_numbers_that_are_not_those(text: str) -> None:
    with pytest.raises(ConfigError, match="takes") as error:
        load_step_time(text)
    assert repr(text) in str(error.value)
