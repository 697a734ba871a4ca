"""The README's figures are those of the run that is kept beside the tests."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from loadgen.figures.command import picture_name
from loadgen.figures.report import claims_of, markdown, outcomes_of, score
from loadgen.figures.studies import STUDIES as ALL_STUDIES

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
SUMMARY: dict[str, Any] = json.loads((ROOT / "tests/data/demo/summary.json").read_text())


def table_rows() -> dict[str, list[str]]:
    rows = [line.strip("|").split("|") for line in README.splitlines() if line.startswith("|")]
    cells = [[cell.strip().strip("*") for cell in row] for row in rows]
    return {row[0]: row[1:] for row in cells}


def expected(run: dict[str, Any]) -> list[str]:
    steps, replay = run["steps_steady"], run["replay"]
    return [
        f"{steps['imbalance_tokens'] / 1e4:.2f}",
        f"{100 * steps['idle_share']:.1f} %",
        f"{run['throughput_tok_s']:,.0f}",
        f"{replay['mean_tpot_ms']:.2f}",
        f"{replay['mean_ttft_ms']:.0f} / {replay['p99_ttft_ms']:.0f}",
        f"{steps['energy_j_per_token']:.4f}",
        f"{steps['mean_load_tokens']:,.0f}",
        f"{replay['steady']['mean_admitted_prompt_tokens']:.0f}",
        f"{replay['failed']}, {replay['lost']}",
    ]


def test_the_table_is_the_summary() -> None:
    rows = table_rows()
    for run in SUMMARY["runs"]:
        assert rows[f"{run['policy']}, {run['dispatch']}"] == expected(run)


def test_the_comparison_is_the_summary() -> None:
    ratios = SUMMARY["comparison"]
    for name, text in (("imbalance", ".2f"), ("throughput", ".3f"), ("tpot", ".3f")):
        assert f"x {ratios[f'{name}_ratio']:{text}}" in README
    assert f"{SUMMARY['conditions']['requests']:,}" in README
    assert SUMMARY["statement"].rstrip(".") in README


def test_the_kept_run_shows_what_is_claimed() -> None:
    assert all(run["complete"] for run in SUMMARY["runs"])
    assert SUMMARY["warnings"] == []
    assert SUMMARY["comparison"]["imbalance_ratio"] <= 0.25
    assert SUMMARY["comparison"]["throughput_ratio"] >= 1.04


FIGURES = ROOT / "tests/data/figures"
STUDIES: dict[str, Any] = json.loads((FIGURES / "figures.json").read_text())
ADMISSION = README.partition("\n**Simulated** (`evenstep figures")[2].partition("\nIn plain words")[
    0
]
SECTION = README.partition("\n## Simulated figures\n")[2].partition("\n## ")[0]


def test_what_is_shown_of_the_figures_is_what_was_simulated() -> None:
    outcomes = outcomes_of(STUDIES)
    pictures = {name: picture_name(name) for name in outcomes if ALL_STUDIES[name].draw}
    assert markdown(outcomes, pictures) == (FIGURES / "figures.md").read_text()
    assert list(outcomes) == list(ALL_STUDIES)


def test_claims_are_judged_by_the_kept_figures() -> None:
    outcomes = outcomes_of(STUDIES)
    for name, study in STUDIES["studies"].items():
        judged = [(claim.text, claim.met) for claim in claims_of(name, outcomes[name])]
        assert judged == [(claim["claim"], claim["met"]) for claim in study["claims"]]


@pytest.mark.parametrize("section", [SECTION, ADMISSION], ids=["routing", "admission"])
def test_the_simulated_figures_of_the_readme_are_the_kept_ones(section: str) -> None:
    kept = {line.replace("**", "") for line in (FIGURES / "figures.md").read_text().splitlines()}
    shown = [line.replace("**", "") for line in section.splitlines() if line.startswith("|")]
    assert shown
    assert [line for line in shown if line not in kept] == []


def test_the_readme_says_how_many_claims_are_met() -> None:
    assert score(outcomes_of(STUDIES)) in SECTION


def test_the_preemptions_of_the_readme_are_those_of_the_engines() -> None:
    runs = json.loads((ROOT / "tests/data/admission/engine.json").read_text())["runs"]
    counts = [", ".join(str(run["preemptions"]) for run in each) for each in runs.values()]
    assert len(counts) == 4
    assert [each for each in counts if f"| {each} |" not in README] == []


def test_pictures_of_the_readme_exist() -> None:
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README)
    assert pictures
    assert [path for path in pictures if not (ROOT / path).is_file()] == []
