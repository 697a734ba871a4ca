"""The router's counters during a replay: load, imbalance, energy, from its own /metrics."""

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from loadgen.replay.replay_results import Report, ratio
from router.core.state.barrier import StepTotals

# Counter -> field of StepTotals; each has the labels group and pool ("empty" or "waiting").
COUNTERS = {
    "evenstep_barrier_steps_total": "steps",
    "evenstep_imbalance_tokens_total": "imbalance_tokens",
    "evenstep_max_load_tokens_total": "max_load_tokens",
    "evenstep_load_tokens_total": "load_tokens",
    "evenstep_worker_steps_total": "worker_steps",
    "evenstep_step_seconds_total": "step_s",
    "evenstep_energy_joules_total": "energy_j",
    "evenstep_output_tokens_total": "output_tokens",
    "evenstep_waiting_seconds_total": "waiting_s",
    "evenstep_timed_worker_seconds_total": "timed_s",
}
POOL_WAITING = "waiting"

# Counters at one moment, by group and pool state.
Scrape = Mapping[str, Mapping[str, StepTotals]]


@dataclass(frozen=True, slots=True)
class Scrapes:
    """Counters at the four turning points of a run; None where one was not reached."""

    start: Scrape | None = None
    warm: Scrape | None = None
    drain: Scrape | None = None
    end: Scrape | None = None


def parse_metrics(text: str) -> Scrape:
    """Parse the router's counters from a Prometheus exposition; ignore other metrics."""
    lines = [line for line in text.splitlines() if line.startswith(tuple(COUNTERS))]
    groups: dict[str, dict[str, StepTotals]] = {}
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            pools = groups.setdefault(sample.labels["group"], {})
            counted = StepTotals(**{COUNTERS[sample.name]: sample.value})  # type: ignore[arg-type]
            pool = sample.labels["pool"]
            pools[pool] = pools.get(pool, StepTotals()) + counted
    return groups


def cluster_report(scrapes: Scrapes) -> Report | None:
    """Summarize the group with the most steps, and name the others; None without counters.

    There are averages over the whole run and over its steady part; each over all steps, and over
    the steps that ended with requests waiting in the pool.
    """
    if scrapes.start is None or scrapes.end is None:
        return None
    steps = {group: _difference(scrapes.start, scrapes.end, group).steps for group in scrapes.end}
    group = max(steps, key=steps.__getitem__, default="")
    if not steps.get(group):
        return None
    return {
        "group": group,
        "other_groups": sorted(each for each, made in steps.items() if made and each != group),
        "idle_share_is": "the router's: as engines timed it, else modelled by the cost of a step",
        "whole": _window(scrapes.start, scrapes.end, group),
        "steady": _window(scrapes.warm, scrapes.drain, group),
    }


def _difference(
    first: Scrape, last: Scrape, group: str, only_pool: str | None = None
) -> StepTotals:
    total, before = StepTotals(), first.get(group, {})
    for pool, totals in last.get(group, {}).items():
        if only_pool in (None, pool):
            total += totals - before.get(pool, StepTotals())
    return total


def _window(first: Scrape | None, last: Scrape | None, group: str) -> Report | None:
    if first is None or last is None:
        return None
    return {
        **figures(_difference(first, last, group)),
        "pool_waiting": figures(_difference(first, last, group, POOL_WAITING)),
    }


def figures(totals: StepTotals) -> Report:
    """Return averages over some steps, by their sums; None where nothing was counted."""
    return {
        "steps": int(totals.steps),
        "avg_imbalance_tokens": ratio(totals.imbalance_tokens, totals.steps),
        "mean_load_tokens": ratio(totals.load_tokens, totals.worker_steps),
        "max_load_tokens": ratio(totals.max_load_tokens, totals.steps),
        "idle_share": ratio(totals.waiting_s, totals.timed_s),
        "step_mean_s": ratio(totals.step_s, totals.steps),
        "throughput_tok_s": ratio(totals.output_tokens, totals.step_s),
        "energy_j": totals.energy_j or None,
        "energy_j_per_output_token": ratio(totals.energy_j, totals.output_tokens) or None,
    }
