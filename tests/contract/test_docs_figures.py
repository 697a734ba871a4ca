"""Figures in README and docs/ are those of the runs that are kept beside the tests."""

import json
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from docs.kept_figures import read_figures
from loadgen.demo.worlds import DECODE
from loadgen.figures.figures_document import claims_of, markdown, outcomes_of, score
from loadgen.figures.studies import STUDIES as ALL_STUDIES
from tests.support.docs import README, section_of, text_of, words

ROOT = Path(__file__).resolve().parents[2]
DEMO, ADMISSION = "docs/results/demo.md", "docs/admission.md"
LIVE = "docs/results/live.md"
SIMULATED, COST = "docs/results/simulated.md", "docs/results/router-cost.md"
SUMMARY: dict[str, Any] = json.loads((ROOT / "tests/data/demo/summary.json").read_text())["decode"]


def table_rows(page: str) -> dict[str, list[str]]:
    lines = text_of(page).splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("|")]
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
    rows = table_rows(DEMO)
    for run in SUMMARY["runs"]:
        assert rows[f"{run['policy']}, {run['dispatch']}"] == expected(run)


def test_the_readme_has_some_of_its_rows_and_their_first_columns() -> None:
    runs = {f"{run['policy']}, {run['dispatch']}": expected(run) for run in SUMMARY["runs"]}
    shown = {name: row for name, row in table_rows(README).items() if name in runs}
    assert 3 <= len(shown) <= 5
    assert shown == {name: runs[name][:5] for name in shown}


def test_the_readme_has_the_costs_of_their_page() -> None:
    """Evenstep's and vllm-router's, the first and the fourth column there."""
    costs, shown = table_rows(COST), table_rows(README)
    names = [
        name for name in shown for known in costs if name.strip("-") and known.startswith(name)
    ]
    assert len(names) == 4
    for name in names:
        (row,) = (cells for known, cells in costs.items() if known.startswith(name))
        assert [cell.split()[0] for cell in shown[name]] == [row[0].split()[0], row[3].split()[0]]


@pytest.mark.parametrize("page", [README, DEMO])
def test_the_pages_say_what_the_demo_is(page: str) -> None:
    said = words(text_of(page))
    assert f"{SUMMARY['conditions']['requests']:,} requests" in said
    assert SUMMARY["statement"].rstrip(".") in said


def test_the_kept_run_had_time_and_lost_nothing() -> None:
    assert all(run["complete"] for run in SUMMARY["runs"])
    assert SUMMARY["warnings"] == []


def test_the_bar_of_the_demo_is_what_busy_machines_measured() -> None:
    """The mean less four standard deviations; plus four where less is better."""
    kept = read_figures(ROOT / "tests/data/demo/bar.json")
    measured = [run for run in kept["runs"] if run["throughput"] is not None]
    assert len(measured) == 20
    assert kept["busy_loops"] == 2
    assert f"--requests {DECODE.requests} " in kept["form"]
    for name, deviations in (("throughput", -4), ("imbalance", 4)):
        ratios = [run[name] for run in measured]
        bar = fmean(ratios) + deviations * stdev(ratios)
        assert kept[name]["bar"] == pytest.approx(bar)
        assert DECODE.bars[name] == round(bar, 2)


FIGURES = ROOT / "tests/data/figures"
STUDIES: dict[str, Any] = json.loads((FIGURES / "figures.json").read_text())


def test_what_is_shown_of_the_figures_is_what_was_simulated() -> None:
    outcomes = outcomes_of(STUDIES)
    pictures = {name: f"{name}.png" for name in outcomes if ALL_STUDIES[name].draws}
    assert markdown(outcomes, pictures) == (FIGURES / "figures.md").read_text()
    assert list(outcomes) == list(ALL_STUDIES)


def test_claims_are_judged_by_the_kept_figures() -> None:
    outcomes = outcomes_of(STUDIES)
    for name, study in STUDIES["studies"].items():
        judged = [(claim.text, claim.met) for claim in claims_of(name, outcomes[name])]
        assert judged == [(claim["claim"], claim["met"]) for claim in study["claims"]]


@pytest.mark.parametrize(
    "section",
    [text_of(SIMULATED), section_of(ADMISSION, "Simulated")],
    ids=["routing", "admission"],
)
def test_the_simulated_figures_of_the_docs_are_the_kept_ones(section: str) -> None:
    kept = {line.replace("**", "") for line in (FIGURES / "figures.md").read_text().splitlines()}
    shown = [line.replace("**", "") for line in section.splitlines() if line.startswith("|")]
    assert shown
    assert [line for line in shown if line not in kept] == []


def test_the_page_says_how_many_claims_are_met() -> None:
    assert score(outcomes_of(STUDIES)) in words(text_of(SIMULATED))


def test_the_preemptions_of_the_page_are_those_of_the_engines() -> None:
    runs = json.loads((ROOT / "tests/data/admission/engine.json").read_text())["runs"]
    counts = [", ".join(str(run["preemptions"]) for run in each) for each in runs.values()]
    assert len(counts) == 4
    assert [each for each in counts if f"| {each} |" not in text_of(ADMISSION)] == []


def test_planned_prompts_are_as_soon_as_the_page_says() -> None:
    runs = {
        tuple(case["key"]): case["values"] for case in STUDIES["studies"]["serving_rates"]["cases"]
    }
    said = words(section_of(SIMULATED, "Prompts planned jointly"))
    ours = [key for key in runs if key[2] == "bfio"]
    for text, metric, overload in (
        ("mean TTFT is x {} to {}, p99", "ttft_mean_s", False),
        ("p99 TTFT x {} to {} and", "ttft_p99_s", False),
        ("TPOT x {} to {} at all rates but 11/s", "tpot_mean_s", False),
        ("where prompts queue, mean TTFT is x {} to {} and", "ttft_mean_s", True),
        ("and TPOT x {} to {}.", "tpot_mean_s", True),
    ):
        ratios = []
        for setting, rate, _ in [key for key in ours if (key[1] == "11/s") is overload]:
            pairs = zip(
                *(runs[setting, rate, way][metric] for way in ("bfio", "barrier_time")), strict=True
            )
            ratios.append(fmean(one / other for one, other in pairs))
        assert text.format(f"{min(ratios):.2f}", f"{max(ratios):.2f}") in said


def test_prompts_on_ranks_are_worth_as_much_live_as_is_claimed() -> None:
    kept = read_figures(ROOT / "tests/data/live/prompts_on_ranks.json")
    gains = {case: fmean(found["gains"]) for case, found in kept.items()}
    assert all(len(found["gains"]) == 3 for found in kept.values())
    assert gains["100"] >= 1.15
    assert gains["1000"] >= 1.3


@pytest.mark.parametrize("file", ["serving.json", "serving_prefixes.json"])
def test_whole_engines_are_simulated_as_they_are_live(file: str) -> None:
    rows = read_figures(ROOT / "tests/data/live" / file)["rows"]
    assert {row["policy"] for row in rows} >= {"least_tokens", "least_prefill", "bfio"}
    most = max(abs(off) for row in rows for off in row["off"])
    assert most <= 0.15


def test_with_prefill_workers_our_first_tokens_are_live_first_or_near() -> None:
    """And all times are near the simulated ones."""
    for found in read_figures(ROOT / "tests/data/handoff/short_misses_live.json").values():
        rows = found["rows"]
        ttft_s = {
            arm: fmean(row["live"]["ttft_mean_s"] for row in rows if row["arm"] == arm)
            for arm in {row["arm"] for row in rows}
        }
        assert ttft_s["bfio"] <= 1.03 * min(ttft_s.values())
        for name in ("ttft_mean_s", "tpot_mean_s"):
            assert all(abs(row["live"][name] / row["simulated"][name] - 1) <= 0.1 for row in rows)
