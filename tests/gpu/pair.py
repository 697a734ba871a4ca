"""Two engines on one device behind the router: replays of BurstGPT and Azure's conversations.

    make gpu GPU_FLAGS=pair
    python -m tests.gpu pair --dry-run --slots 8 --requests 40 --clients 24 \\
        --max-tokens 32 --policies jsq,bfio --out /tmp/dry

TTFT and TPOT are the clients'; joules are the device's own counter, which both engines share;
preemptions are those of both. Router and scheduler see the cap of an output, not its length; to end
requests so takes vLLM's first model runner, and some time of each step. The two engines do not wait
for each other (one device runs no barrier, and shares its bandwidth), so this shows the whole
system at work, not what balancing gains. Each replay is kept at once; the same command measures
what is missing.

It has not run on a GPU yet; the second command is how the script itself is tested.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadgen.traces.trace import BUNDLED
from router.core.policies.policy_table import POLICIES
from router.core.types import Snapshot
from tests.gpu.parts import Budget, Parts, measure_with, names_of, options
from tests.gpu.routed import wait_known
from tests.gpu.serving import Engine, Machine, engine, machine_facts
from tests.support.rank_steps import SnapshotLog, reading
from tests.support.replays import run_replay
from tests.support.server import running_router

CONTEXT_TOKENS = 32768
FILE = "pair.json"
RUNS = "runs"
FIGURES = (
    *("completed", "failed", "duration", "total_output_tokens", "output_throughput"),
    *("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms"),
)


def main() -> None:
    """Measure as the command line says."""
    parser = options(__doc__, named="pair")
    parser.add_argument("--slots", type=int, default=64, help="of each engine")
    parser.add_argument("--kv-blocks", type=int, help="of each engine; few make preemptions")
    parser.add_argument("--clients", type=int, default=192, help="more than slots: a pool")
    parser.add_argument("--requests", type=int, default=600, help="of each trace")
    parser.add_argument("--max-tokens", type=int, default=400, help="where outputs are cut")
    parser.add_argument(
        "--traces", default="burstgpt,azure-conv", type=names_of(BUNDLED, files=True)
    )
    parser.add_argument("--policies", default="jsq,least_tokens,bfio", type=names_of(POLICIES))
    measure_with(parser, measure)


def measure(where: Machine, given: argparse.Namespace) -> list[str]:
    """Every trace under every policy, as far as the time goes; what is missing still."""
    asked = ("slots", "kv_blocks", "clients", "requests", "max_tokens")
    settings = {
        **where.settings,
        **{key: getattr(given, key) for key in asked},
        "lengths": f"hidden: every request asks for {given.max_tokens} tokens at most",
    }
    parts = Parts(given.out / FILE, settings)
    budget = Budget(given.limit_s, {RUNS: 1.0})
    pairs = [(t, p) for t in given.traces.split(",") for p in given.policies.split(",")]
    names = list(map(", ".join, pairs))
    if not (missing := parts.missing(RUNS, names)):
        return []
    flags = ["--max-num-seqs", str(given.slots), "--max-model-len", str(CONTEXT_TOKENS)]
    if given.kv_blocks is not None:
        flags += ["--num-gpu-blocks-override", str(given.kv_blocks)]
    if not where.cpu:
        flags += ["--gpu-memory-utilization", "0.42"]
    with (
        engine(where, "first", *flags, hidden_lengths=True) as first,
        engine(where, "second", *flags, hidden_lengths=True) as second,
    ):
        parts.begin(machine_facts(where, first.server), where.commit)
        for name in budget.within(RUNS, missing):
            trace, policy = name.split(", ")
            parts.keep(RUNS, name, run((first, second), where.folder, trace, policy, given))
    return parts.missing(RUNS, names)


def run(
    engines: Sequence[Engine], folder: Path, trace: str, policy: str, given: argparse.Namespace
) -> dict[str, Any]:
    """One replay through a router of its own."""
    endpoints = [each.endpoint for each in engines if each.endpoint is not None]
    workers = [
        f"--worker={each.server.url},snapshots={each.endpoint},slots={given.slots}"
        for each in engines
    ]
    flags = ["--trace", trace, "--arrivals", f"closed:{given.clients}"]
    flags += ["--requests", str(given.requests), "--max-tokens", str(given.max_tokens)]
    with running_router(folder, *workers, "--policy", policy) as router, reading(endpoints) as log:
        wait_known(router)
        before = last(log)
        report = run_replay(router.url, folder / "replay.json", *flags)
        log.rest(report["completed"])
        after = last(log)
    return {
        "trace": trace,
        "policy": policy,
        **{key: report[key] for key in FIGURES},
        "preemptions": grown(before, after, "preemptions_total"),
        "energy_j_per_output_token": _joules_per_token(before, after, report),
        "imbalance_tokens_sampled": report["cluster"]["whole"]["avg_imbalance_tokens"],
    }


def last(log: SnapshotLog) -> list[Snapshot]:
    """What each rank has told last."""
    return [told[-1] for told in log.snapshots]


def grown(before: Sequence[Snapshot], after: Sequence[Snapshot], counter: str) -> int:
    """What a counter of all ranks has grown by."""
    return sum(
        getattr(b, counter) - getattr(a, counter) for a, b in zip(before, after, strict=True)
    )


def _joules_per_token(
    before: Sequence[Snapshot], after: Sequence[Snapshot], report: dict[str, Any]
) -> float | None:
    """The device's, from one engine's reading: the other one reads the same counter."""
    first, last = before[0].energy_j, after[0].energy_j
    if first is None or last is None or not report["total_output_tokens"]:
        return None
    return (last - first) / float(report["total_output_tokens"])
