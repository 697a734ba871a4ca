"""``evenstep fluid``."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., tuple[int, str, str]]
Ask = Callable[..., tuple[dict[str, Any], str]]

EXAMPLE_2 = ("--rates", "4", "--lengths", "1:1", "--step-time", "1,0")
NESTED_4 = ("--rates", "20,40,80,160", "--lengths", "10:20,10:40,10:80,10:160")
LMSYS = ("--rates", "23,11,8,7,6,4,3,2,1,1", "--step-time", "1,0")
RANGES = ",".join(f"62:{first + 1}-{first + 50}" for first in range(0, 500, 50))


@pytest.fixture
def run(evenstep: Run) -> Run:
    return partial(evenstep, "fluid")


@pytest.fixture
def ask(run: Run) -> Ask:
    def asked(*arguments: str) -> tuple[dict[str, Any], str]:
        code, out, told = run(*arguments, "--json", "-")
        assert code == 0, told
        return json.loads(out), " ".join(told.split())

    return asked


def test_example_2_has_just_enough(ask: Ask) -> None:
    found, told = ask(*EXAMPLE_2, "--capacity", "12")

    (period,) = found["periods"]
    assert (period["stable"], period["memory_tokens"], period["enough_memory"]) == (True, 12, True)
    assert period["throughput_tok_s"] == 4
    assert period["requests"] == [8]
    assert "M* = 12 tokens" in told
    assert "M*: enough memory" in told
    assert found["wait"]["thresholds"] == [5]
    assert found["wait"]["short_tokens"] == 3


def test_what_sums_only_nearly_to_the_memory_is_enough(ask: Ask) -> None:
    """10 (0.1 + 0.2) 3 tokens, which numbers of a computer make a little more than 9."""
    found, told = ask(
        "--rates", "0.1,0.2", "--lengths", "1:1,1:1", "--step-time", "10,0", "--kv-tokens", "9"
    )

    (period,) = found["periods"]
    assert period["memory_tokens"] > 9
    assert (period["enough_memory"], period["short_tokens"]) == (True, 0)
    assert "M* = 9 tokens" in told
    assert "sustain" not in told


def test_too_little_memory_is_told_with_what_it_sustains(ask: Ask) -> None:
    found, told = ask(*EXAMPLE_2, "--kv-tokens", "9")

    assert found["periods"][0]["short_tokens"] == 3
    assert found["periods"][0]["sustainable_share"] == 0.75
    assert "M*: not enough memory, short by 3 tokens" in told
    assert "9 tokens of memory sustain 75% of these rates" in told


def test_unstable_rates_are_told(ask: Ask) -> None:
    found, told = ask("--rates", "4", "--lengths", "1:1", "--step-time", "1,0.125")

    (period,) = found["periods"]
    assert (period["stable"], period["load"]) == (False, 1.5)
    assert (period["memory_tokens"], period["step_s"]) == (None, None)
    assert (found["wait"]["thresholds"], found["nested_wait"]["best_segments"]) == (None, None)
    assert "unstable: the load is 150%," in told
    assert "below 66.67% of these rates it is stable" in told
    assert told.count("no thresholds are valid") == 2


def test_unstable_rates_are_short_of_any_memory(ask: Ask) -> None:
    found, told = ask(
        "--rates", "4", "--lengths", "1:1", "--step-time", "1,0.125", "--kv-tokens", "12"
    )

    assert found["periods"][0]["sustainable_share"] == 0.4
    assert "M*: no memory is enough" in told
    assert "12 tokens of memory sustain 40% of these rates" in told


def test_costs_per_request_and_prompt_token_count(ask: Ask) -> None:
    found, _ = ask(
        "--rates", "2", "--lengths", "10:4", "--step-time", "0.1,1e-3,2e-3,5e-3",
    )  # fmt: skip

    assert found["periods"][0]["load"] == pytest.approx(2 * (1e-3 * 60 + 2e-3 * 5 + 5e-3 * 10))


def test_printed_thresholds_are_on_the_edge(ask: Ask) -> None:
    found, told = ask(*NESTED_4, "--total-rate", "100", "--nested-thresholds", "15,14,12,8")

    (check,) = found["checks"]
    assert [each["verdict"] for each in check["conditions"]] == ["holds", "edge", "edge", "edge"]
    assert not check["valid"]
    assert check["nearest"] == [15, 15, 13, 9]
    assert check["memory_tokens"] is None
    assert "edge: (12) p_3 < n_4 / n_3: 0.666667 against 0.666667" in told
    assert "not valid: the nearest that are, raised: 15:15:13:9" in told


def test_valid_thresholds_are_told_with_their_memory(ask: Ask) -> None:
    found, told = ask(*EXAMPLE_2, "--thresholds", "6", "--kv-tokens", "18")

    (check,) = found["checks"]
    assert (check["policy"], check["valid"], check["memory_tokens"]) == ("wait", True, 18)
    assert "valid; 18 tokens: enough memory" in told


def test_thresholds_that_nothing_mends(ask: Ask) -> None:
    _, told = ask("--rates", "4", "--lengths", "1:1", "--step-time", "1,0.125", "--thresholds", "6")

    assert "broken: (11) step of full batch < n_1 / lambda_1: 3.25 against 1.5" in told
    assert "not valid, and no greater ones are at these rates" in told


def test_memory_against_segments(ask: Ask) -> None:
    """Figure 16, with 50 requests a step and the rates of section 6.2 spread over 500 lengths."""
    found, told = ask(
        *LMSYS, "--lengths", RANGES, "--total-rate", "50", "--segments", "10,2,50",
        "--steps", "200", "--delta", "0.1",
    )  # fmt: skip

    assert found["types"] == 500
    rows = found["nested_wait"]["by_segments"]
    assert [row["segments"] for row in rows] == [2, 10, 50]
    assert found["nested_wait"]["best_segments"] == 10
    assert rows[1]["last_stages"] == list(range(50, 501, 50))
    for row in rows:
        parts = row["batch_tokens"] + row["queue_tokens"] + row["buffer_tokens"]
        assert row["memory_tokens"] == pytest.approx(parts)
    assert "…" in told
    assert "give --kv-tokens to compare" in told


def test_segments_too_few_to_be_stable_are_left_out(ask: Ask) -> None:
    found, told = ask(
        "--rates", "10,1", "--lengths", "10:10,10:1000", "--step-time", "1e-2,1e-7,1e-5",
        "--total-rate", "60",
    )  # fmt: skip

    assert found["periods"][0]["stable"]
    assert [row["thresholds"] is None for row in found["nested_wait"]["by_segments"]] == [
        True,
        False,
    ]
    assert "1 - - - - -" in told


def test_rates_of_several_periods(ask: Ask) -> None:
    found, told = ask(
        "--rates", "9,3", "--rates", "2,4", "--lengths", "2:1,2:5", "--step-time", "1,0",
        "--nested-thresholds", "13,4",
    )  # fmt: skip

    assert len(found["periods"]) == 2
    assert "period 2: stable" in told
    assert found["wait"]["thresholds"] == [10, 5]
    assert found["checks"][0]["nearest"] == [13, 9]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        pytest.param(("--rates", "1,2"), "2 rates for 1 types", id="one rate each"),
        pytest.param(("--rates", "0"), "--rates must be from 1e-09", id="rate 0"),
        pytest.param(("--rates", "x"), "--rates takes numbers", id="rate"),
        pytest.param(("--lengths", "3"), "--lengths takes IN:OUT", id="length"),
        pytest.param(("--lengths", "0:3"), "prompts of 1 to 1000000 tokens", id="prompt 0"),
        pytest.param(("--lengths", "1:4-3"), "IN:A-B with A up to B", id="range"),
        pytest.param(("--lengths", "1:1-5000"), "more than 1000 types", id="types"),
        pytest.param(("--total-rate", "0"), "--total-rate must be from 1e-09", id="total"),
        pytest.param(("--step-time", "0,1"), "--step-time", id="step time"),
        pytest.param(("--step-time", "1e300,1"), "none above 1e+06", id="huge step time"),
        pytest.param(("--rates", "1e-300"), "--rates must be from 1e-09", id="tiny rate"),
        pytest.param(("--thresholds", "1,2"), "--thresholds: 2 for 1 types", id="thresholds"),
        pytest.param(("--thresholds", "1.5"), "whole numbers from 1", id="whole"),
        pytest.param(("--nested-thresholds", "1,2"), "2 segments for 1", id="nested"),
        pytest.param(("--segments", "2"), "give 1 at most, the number of different", id="segments"),
        pytest.param(("--steps", "0"), "--steps must be from 1", id="steps"),
        pytest.param(("--delta", "1"), "--delta must be between 0 and 1", id="delta"),
    ],
)
def test_bad_input(run: Run, arguments: tuple[str, str], complaint: str) -> None:
    given = {"--rates": "1", "--lengths": "10:10"} | {arguments[0]: arguments[1]}

    code, _, err = run(*(word for option in given.items() for word in option))

    assert code == 2
    assert complaint in " ".join(err.split())


def test_a_measured_step_time(ask: Ask, tmp_path: Path) -> None:
    file = tmp_path / "step_time.json"
    file.write_text('{"base_s": 1.0, "per_token_s": 0.01, "per_request_s": 0.02}')

    found, _ = ask("--rates", "4", "--lengths", "1:1", "--step-time", str(file))

    assert found["periods"][0]["load"] == pytest.approx(4 * (0.01 * 3 + 0.02 * 2))
