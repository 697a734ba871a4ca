"""The file of a measurement in parts: whole at any moment, and never of two measurements."""

import json
from argparse import ArgumentTypeError
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from loadgen.model.measured_step_time import load_step_time
from router.core.errors import InputError
from tests.gpu.measure import DECODE, IDLE, PROMPTS, ROUNDS, SHARES, figures, known_parts
from tests.gpu.parts import CODE, LIMIT_S, Budget, OtherConditionsError, Parts, Values

SETTINGS = {"shape": "tiny", "flags": ("--a",)}
COMMIT = "5f1e"
MACHINE = {"device": "CPU", "vllm": "0.32.0"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "made" / "step_time.json"


def count(parts: Mapping[str, Values]) -> tuple[Values, Values]:
    return {"parts_there": sum(map(len, parts.values()))}, {"kinds": sorted(parts)}


def kept(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def two_parts(file: Path) -> Parts:
    parts = Parts(file, SETTINGS, count)
    parts.begin(MACHINE, COMMIT)
    parts.keep("points", "1 x 8", {"step_s": 0.5})
    parts.keep("points", "2 x 8", None)
    return parts


def test_a_part_is_in_the_file_at_once(file: Path) -> None:
    parts = two_parts(file)
    assert kept(file)["parts_there"] == 2
    parts.keep("idle", "power_w", 71.5)

    found = kept(file)
    assert (found["parts_there"], found["measured"]["kinds"]) == (3, ["idle", "points"])
    assert found["measured"]["parts"]["points"] == {"1 x 8": {"step_s": 0.5}, "2 x 8": None}
    assert found["measured"]["machine"] == MACHINE
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_nothing_is_written_before_there_is_a_part(file: Path) -> None:
    Parts(file, SETTINGS).begin(MACHINE, COMMIT)
    assert not file.exists()


def test_another_call_goes_on_with_what_is_there(file: Path) -> None:
    two_parts(file)
    parts = Parts(file, SETTINGS, count)
    assert parts.missing("points", ["1 x 8", "2 x 8", "4 x 8"]) == ["4 x 8"]
    assert parts.missing("rounds", ["1"]) == ["1"]

    parts.begin(MACHINE, COMMIT)
    parts.keep("points", "4 x 8", {"step_s": 0.6})
    found = kept(file)["measured"]
    assert list(found["parts"]["points"]) == ["1 x 8", "2 x 8", "4 x 8"]
    assert [call["commit"] for call in found["calls"]] == [COMMIT] * 2
    assert found["origin"].items() >= found["calls"][-1].items()
    assert found["origin"]["code"].keys() == set(CODE)


def test_a_write_that_fails_leaves_the_file_as_it_was(file: Path) -> None:
    parts = two_parts(file)
    before = file.read_bytes()
    with pytest.raises(TypeError):
        parts.keep("points", "4 x 8", object())
    assert file.read_bytes() == before


def test_parts_of_other_settings_are_refused(file: Path) -> None:
    two_parts(file)
    other = {"shape": "large", "flags": ["--a"], "steps": 9}
    with pytest.raises(OtherConditionsError) as error:
        Parts(file, other)
    assert "another setting: shape is large, was tiny; steps is 9, was None" in str(error.value)
    assert "name another file with --out" in str(error.value)


def test_parts_of_another_machine_are_refused(file: Path) -> None:
    two_parts(file)
    with pytest.raises(OtherConditionsError, match="another machine: device is GPU, was CPU"):
        Parts(file, SETTINGS).begin({**MACHINE, "device": "GPU"}, COMMIT)


@pytest.mark.parametrize("text", ["", "[]", '{"base_s": 1}', '{"measured": {"settings": {}}}'])
def test_another_kind_of_file_is_not_written_over(file: Path, text: str) -> None:
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(OtherConditionsError, match="holds no parts of a measurement"):
        Parts(file, SETTINGS)
    assert file.read_text() == text


def decoded(batch: int) -> dict[str, Any]:
    cost = {"requests": batch, "load_tokens": 10.0 * batch, "step_s": 0.1 + 0.01 * batch}
    return {**cost, "steps": 5, "power_w": 100.0 + batch}


def test_a_step_time_is_there_with_the_third_point(file: Path) -> None:
    parts = Parts(file, SETTINGS, figures)
    parts.begin(MACHINE, COMMIT)
    parts.keep(DECODE, "9 x 9", None)
    for batch in (1, 2, 3):
        parts.keep(DECODE, f"{batch} x 10", decoded(batch))
        if batch == 2:
            with pytest.raises(InputError, match=r"base_s in .* got null"):
                load_step_time(str(file))
    assert load_step_time(str(file)).seconds(40, 4) == pytest.approx(0.14)
    assert load_step_time(str(file)).per_prompt_token_s == 0
    found = kept(file)["measured"]["fits"]
    assert found["decode"]["r_squared"] == pytest.approx(1)
    assert (found["power"], found["plug_in"], "prompts" in found) == (None, None, False)


def test_every_fit_is_in_the_file_with_its_residuals(file: Path) -> None:
    parts = Parts(file, SETTINGS, figures)
    parts.begin(MACHINE, COMMIT)
    for batch in (1, 2, 3):
        parts.keep(DECODE, f"{batch} x 10", decoded(batch))
    for tokens in (100, 200):
        alone = {**decoded(1), "step_s": 0.11 + 1e-4 * tokens, "prompt_tokens": tokens}
        parts.keep(PROMPTS, f"{tokens} beside 0", alone)
    parts.keep(IDLE, "power_w", 100.0)
    parts.keep(ROUNDS, "1", {"on_step_s": 3.0, "off_step_s": 2.0})
    assert load_step_time(str(file)).base_s == pytest.approx(0.1)
    assert load_step_time(str(file)).per_prompt_token_s == pytest.approx(1e-4)
    found = kept(file)["measured"]["fits"]
    assert found["power"]["exponent"] == pytest.approx(1)
    assert found["plug_in"]["ratio"] == 1.5
    for part, names in (("decode", 3), ("prompts", 2), ("power", 3)):
        assert len(found[part]["residuals"]) == names


def test_the_plug_in_s_cost_is_the_median_of_the_turns_so_far() -> None:
    took = {str(n): {"on_step_s": ratio, "off_step_s": 1.0} for n, ratio in enumerate((3, 1, 2))}
    _, beside = figures({ROUNDS: took})
    assert (beside["fits"]["plug_in"]["ratio"], beside["fits"]["plug_in"]["rounds"]) == (2, 3)


def test_a_part_leaves_the_rest_of_its_time_to_the_next() -> None:
    now_s = 1000.0
    budget = Budget(240, {"a": 0.25, "b": 0.75}, lambda: now_s)
    assert (budget.left_s("a"), budget.left_s("b")) == (50, 200)
    measured = []
    for name in budget.within("a", "xyz"):
        measured.append(name)
        now_s += 30
    assert measured == ["x", "y"]
    assert budget.left_s("b") == 140
    assert list(budget.within("a", "z")) == []


def test_the_shares_are_the_whole_time() -> None:
    assert sum(SHARES.values()) == pytest.approx(1)
    assert LIMIT_S + 40 <= 600


def test_parts_keep_their_order_and_others_are_refused() -> None:
    assert known_parts("plug-in,decode") == (DECODE, ROUNDS)
    with pytest.raises(ArgumentTypeError, match="'grid' is none of decode, prompts, idle, plug-in"):
        known_parts("grid")
