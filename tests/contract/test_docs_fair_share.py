"""What the page says of keys that compete is what was measured."""

import json
from pathlib import Path
from typing import Any

from tests.support.docs import text_of, words

ROOT = Path(__file__).resolve().parents[2]
PAGE = "docs/results/fairness.md"
SECTION = words(text_of(PAGE))
KEPT: dict[str, Any] = json.loads((ROOT / "tests/data/fairness/fair_share.json").read_text())
BURSTS, SINGLE = KEPT["bursts"], KEPT["single"]


def turned_away(runs: list[dict[str, Any]]) -> float:
    """Share of the slower key's requests that found no place."""
    refused = sum(run["slow"]["answers"].get("429", 0) for run in runs)
    asked = sum(run["slow"]["requests"] for run in runs)
    return float(refused / asked)


def test_figures_are_those_of_the_kept_runs() -> None:
    for name, case in (("bursts", BURSTS), ("single", SINGLE)):
        p99_s = case["slow_queue_p99_s"]
        times = " | ".join(f"{p99_s[key]:.2f} s" for key in ("alone", "both", "without_keys"))
        assert f"| {name} | {times} |" in SECTION
        away = [turned_away(case["runs"][key]) for key in ("both", "without_keys")]
        assert f"| {100 * away[0]:.0f} % / {100 * away[1]:.0f} % |" in SECTION
    ratios = BURSTS["ratios"]
    assert f"| x {BURSTS['ratio']:.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |" in SECTION


def test_what_was_asked_is_met() -> None:
    assert KEPT["times"] == 20
    assert max(BURSTS["ratios"]) <= 2
    assert min(run["slow"]["queue_p99_s"] for run in BURSTS["runs"]["alone"]) > 0.5
    for case in (BURSTS, SINGLE):
        assert turned_away(case["runs"]["both"]) == 0
        assert all(run["sent_late_p99_s"] < 0.5 for runs in case["runs"].values() for run in runs)
