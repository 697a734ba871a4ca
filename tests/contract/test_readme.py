"""The README's figures are those of the run that is kept beside the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
