"""Report of a replay as a table for the terminal."""

from collections.abc import Mapping
from typing import cast

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from loadgen.replay.replay_results import Report
from loadgen.report.numbers import number, plain_table

LATENCIES = (
    ("TTFT", "ttft"),
    ("TPOT", "tpot"),
    ("ITL, between arrivals", "itl"),
    ("end to end", "e2el"),
    ("client's lateness", "lateness"),
)


def replay_table(report: Report) -> RenderableType:
    """Tables of the requests, the latencies and the cluster's figures, then notes."""
    steady = cast(Report, report["steady"] or {})
    table = plain_table("", "whole run", "steady")
    for label, key in (("requests", "num_prompts"), ("completed", "completed")):
        table.add_row(label, number(report[key]))
    for label in ("failed", "rejected", "lost"):
        if report[label]:
            table.add_row(label, number(report[label]), style="red")
    table.add_row("duration, engine s", number(report["duration"]), number(steady.get("duration")))
    for label, key in (
        ("output tok/s", "output_throughput"),
        ("total tok/s", "total_token_throughput"),
        ("requests/s", "request_throughput"),
        ("good requests/s", "request_goodput"),
        ("mean admitted prompt, tokens", "mean_admitted_prompt_tokens"),
        ("cached, share of prompt tokens", "cached_prompt_share"),
    ):
        if report[key] is not None:
            table.add_row(label, number(report[key]), number(steady.get(key)))
    parts = ("mean", "median", "p99")
    latencies = plain_table("engine ms", *parts)
    for label, name in LATENCIES:
        latencies.add_row(label, *(number(report[f"{part}_{name}_ms"]) for part in parts))
    return Group(table, latencies, *_cluster(report), *map(Text, _notes(report)))


def _cluster(report: Report) -> list[Table]:
    cluster = cast(Report | None, report["cluster"])
    if cluster is None:
        return []
    table = plain_table("cluster", "whole run", "steady")
    windows = [cast(Report, cluster[name] or {}) for name in ("whole", "steady")]
    for label, key in (
        ("imbalance, tokens", "avg_imbalance_tokens"),
        ("mean load, tokens", "mean_load_tokens"),
        ("max load, tokens", "max_load_tokens"),
        ("idle share", "idle_share"),
        ("energy, J/token", "energy_j_per_output_token"),
    ):
        table.add_row(label, *(number(window.get(key)) for window in windows))
    return [table]


def _notes(report: Report) -> list[str]:
    notes = [f"Times are wall seconds / {report['time_scale']:g}. Seed {report['seed']}."]
    if met := cast(Mapping[str, float], report["met_by_class"]):
        shares = ", ".join(f"{name} {share:.1%}" for name, share in met.items())
        notes.append(f"Targets met: {shares}.")
    if report["cluster"] is None:
        notes.append(
            "No cluster figures: the server is no Evenstep router that is told of its workers' "
            "steps (snapshots= of a worker)."
        )
    elif others := (cluster := cast(Report, report["cluster"]))["other_groups"]:
        named = ", ".join(cast(list[str], others))
        notes.append(f"Cluster figures are those of group {cluster['group']}, without {named}.")
    if report["steady"] is None:
        notes.append("Too short for a steady window.")
    if report["lengths_revealed"]:
        notes.append("Every request revealed its output length.")
    if report["interrupted"]:
        notes.append("Interrupted: the figures are those of what had ended.")
    errors = cast(dict[str, int], report["errors"])
    notes.extend(f"{count} x {message}" for message, count in errors.items())
    return notes
