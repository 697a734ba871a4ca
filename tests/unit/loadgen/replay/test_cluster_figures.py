"""The router's counters, and what their differences say."""

import pytest

from loadgen.replay.router_counters import (
    Scrapes,
    cluster_report,
    figures,
    parse_metrics,
)
from router.core.state.barrier import StepTotals

EXPOSITION = """\
# HELP evenstep_barrier_steps_total Steps.
# TYPE evenstep_barrier_steps_total counter
evenstep_barrier_steps_total{group="a",pool="empty"} 3.0
evenstep_barrier_steps_total{group="a",pool="waiting"} 7.0
evenstep_barrier_steps_total{group="b",pool="empty"} 1.0
evenstep_step_seconds_total{pool="waiting",group="a"} 0.5
evenstep_energy_joules_total{group="a",pool="waiting"} 1e3
evenstep_pool_requests{group="a"} 5.0
python_info{version="3"} 1.0
"""

START = {"g": {"empty": StepTotals(steps=10, imbalance_tokens=5)}, "other": {}}
MIDDLE = {"g": {"empty": StepTotals(steps=10, imbalance_tokens=5)}}
END = {
    "g": {
        "empty": StepTotals(14, 105, 400, 600, 8, 2.0, 80.0, 100, waiting_s=1.0, timed_s=4.0),
        "waiting": StepTotals(6, 60, 600, 1140, 12, 3.0, 120.0, 100, waiting_s=0.5, timed_s=6.0),
    },
    "other": {"empty": StepTotals(steps=1)},
}


def test_parse_metrics() -> None:
    assert parse_metrics(EXPOSITION) == {
        "a": {
            "empty": StepTotals(steps=3),
            "waiting": StepTotals(steps=7, step_s=0.5, energy_j=1000.0),
        },
        "b": {"empty": StepTotals(steps=1)},
    }
    assert parse_metrics("") == {}


def test_report_is_about_the_busiest_group() -> None:
    report = cluster_report(Scrapes(START, MIDDLE, None, END))
    assert report is not None
    assert (report["group"], report["other_groups"]) == ("g", ["other"])
    assert report["steady"] is None
    whole = report["whole"]
    assert isinstance(whole, dict)
    assert whole["steps"] == 10
    assert whole["avg_imbalance_tokens"] == 16
    assert whole["mean_load_tokens"] == 1740 / 20
    assert whole["max_load_tokens"] == 100
    assert whole["idle_share"] == pytest.approx((1.0 + 0.5) / (4.0 + 6.0))
    assert whole["step_mean_s"] == 0.5
    assert whole["throughput_tok_s"] == 40
    assert whole["energy_j_per_output_token"] == 1.0
    assert whole["pool_waiting"]["avg_imbalance_tokens"] == 10


def test_no_report_without_counters_or_steps() -> None:
    assert cluster_report(Scrapes()) is None
    assert cluster_report(Scrapes(START, None, None, START)) is None


def test_figures_of_nothing_are_none() -> None:
    found = figures(StepTotals())
    assert found.pop("steps") == 0
    assert set(found.values()) == {None}


def test_an_idle_share_that_the_router_does_not_know_is_none() -> None:
    assert figures(StepTotals(1, 1, 1, 1, 1, 1.0))["idle_share"] is None
