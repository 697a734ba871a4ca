"""What the page shows of ``evenstep diagnose`` is what it printed, measured and judges by."""

import json
from pathlib import Path
from typing import Any

from loadgen.diagnose.analysis import verdict
from loadgen.diagnose.analysis.verdict import Word
from tests.support.docs import README, section_of, text_of

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests/data/diagnose"
PAGE = "docs/observe-and-diagnose.md"
SECTION = section_of(PAGE, "Diagnose")
BENCH: dict[str, Any] = json.loads((DATA / "bench.json").read_text())


def switch_row(row: dict[str, Any]) -> str:
    """A switch to bfio: before, measured after it, and by how much the predicted gain was off."""
    cells = [f"{row['fleet']}, {row['before']}", str(row["seed"])]
    scales = {"idle_share": 100.0, "imbalance_tokens": 1e-4, "throughput_tok_s": 1.0}
    for name, scale in scales.items():
        change = row[name]
        digits = 0 if scale == 1 else (1 if scale == 100 else 2)
        before, predicted, measured = (
            f"{scale * change[key]:,.{digits}f}" for key in ("before", "predicted", "measured")
        )
        cells.append(f"{before} → {measured} ({predicted}; {100 * change['gain_error']:+.0f} %)")
    return f"| {' | '.join(cells)} |"


def test_the_output_is_what_was_printed() -> None:
    for name in ("before", "after"):
        printed = (DATA / f"{name}.txt").read_text().rstrip()
        assert f"```\n{printed}\n```" in SECTION


def test_the_readme_shows_lines_of_it() -> None:
    printed = (DATA / "before.txt").read_text().splitlines()
    block = text_of(README).partition("```\nBalancing pays here.\n")[2].partition("```")[0]
    shown = block.splitlines()
    assert len(shown) > 5
    assert [line for line in shown if line not in printed] == []


def test_the_table_of_switches_is_what_was_measured() -> None:
    assert [row for row in map(switch_row, BENCH["switches"]) if row not in SECTION] == []


def test_every_kind_of_cluster_got_its_verdict() -> None:
    assert {row["cluster"]: row["verdict"] for row in BENCH["kinds"]} == {
        "balanced": "already_even",
        "no barrier": "no_barrier",
        "KV-starved": "kv_starved",
        "little load": "too_little_load",
    }
    verdicts = {(row["verdict_before"], row["verdict_after"]) for row in BENCH["switches"]}
    assert verdicts == {("balancing_pays", "already_even")}


def test_gains_are_predicted_as_well_as_is_claimed() -> None:
    """Where ranks compute prompts, bfio lets tokens be uneven: their imbalance is no gain."""
    most = {"idle_share": 0.1, "throughput_tok_s": 0.25, "imbalance_tokens": 0.1}
    assert {row["fleet"] for row in BENCH["switches"]} == {"plain", "demo", "prompts"}
    for row in BENCH["switches"]:
        for name, bound in most.items():
            if (row["fleet"], name) != ("prompts", "imbalance_tokens"):
                assert abs(row[name]["gain_error"]) <= bound, (row, name)


def test_the_words_and_their_thresholds_are_those_of_the_code() -> None:
    rows = [line for line in SECTION.splitlines() if line.startswith("| `")]
    assert [line.split("`")[1] for line in rows] == [word.value for word in Word]
    shares = (
        verdict.WORTH_A_SWITCH,
        verdict.IDLE_EVEN,
        verdict.ATTENTION_CHEAP,
        verdict.PREEMPTIONS_PER_REQUEST,
        verdict.HELD_SLOTS,
        verdict.FREE_SLOTS,
    )
    text = "".join(rows)
    assert [share for share in shares if f"{100 * share:g} %" not in text] == []
    assert f"{verdict.LEAST_STEPS} steps" in text
    assert f"{verdict.LEAST_REQUESTS} requests" in text
