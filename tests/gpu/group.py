"""A node of GPUs: data-parallel ranks behind one barrier, three ways of spreading their requests.

    make gpu GPU_FLAGS=group
    python -m tests.gpu group --ranks 8 --out FOLDER --limit-s 560
    python -m tests.gpu group --dry-run --ranks 2 --slots 8 --requests 60 --clients 24 \\
        --max-tokens 32 --rounds 1 --out /tmp/dry

One ``vllm serve`` has a rank on each GPU, a mixture of experts over all of them
(``--data-parallel-size N --enable-expert-parallel``): no rank ends a step before the others. It
measures what a GPU draws that waits there (see ``barrier``). Then, in each round, the same requests
reach the same engines in three ways: through the front end's own balancer, and to ranks that the
router names, by ``least_tokens`` and by ``bfio``. Each round begins with another way.

Figures are medians over rounds, with the ratios of each round to vLLM's balancer. TTFT and TPOT are
the clients'; imbalance is the ranks' own from the warm-up to the last sending; joules are those of
all ranks' GPUs during the replay; ``client_cores`` and ``router_cores`` tell whether either was the
bottleneck (each computes on one). Router and scheduler see the cap of an output, not its length.
Loads and rounds are kept at once; the same command measures what is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from loadgen.traces.trace import BUNDLED
from router.core.types import Snapshot
from tests.gpu.barrier import LOADS, Holding, hold, power_figures
from tests.gpu.pair import CONTEXT_TOKENS, FIGURES, grown, last
from tests.gpu.parts import Budget, Parts, Values, measure_with, names_of, options, say
from tests.gpu.routed import wait_known
from tests.gpu.serving import CHUNK_TOKENS, EXPERTS, Engine, Machine, engine, machine_facts
from tests.gpu.steps import NeverSeenError
from tests.support.rank_steps import SnapshotLog, group_figures, reading
from tests.support.replays import run_replay
from tests.support.router_bench.targets import cpu_s
from tests.support.server import Server, running_router, starting

FILE = "group.json"
POWER, ROUNDS = "power", "rounds"
BALANCER = "vLLM's own balancer"
WAYS = (BALANCER, "least_tokens", "bfio")
RANKS = 8
# One event of so many tokens: one client and one router take the tokens of a whole node.
GPU_FLAGS = ("--stream-interval", "4")
# What ``bfio`` runs; a machine that has never run it would do so while the engines wait.
COMPILE = [sys.executable, "-m", "router.core.policies.bfio.calibration"]
MEDIANS = (
    *FIGURES[2:],
    *("imbalance_tokens", "mean_load_tokens", "slot_bubble_steps", "step_mean_s"),
    *("steady_output_throughput", "energy_j", "energy_j_per_output_token", "mean_power_w"),
    *("client_cores", "router_cores"),
)
RATIOS = (
    *("output_throughput", "steady_output_throughput", "mean_tpot_ms", "mean_ttft_ms"),
    *("imbalance_tokens", "energy_j_per_output_token"),
)


def main() -> None:
    """Measure as the command line says."""
    parser = options(__doc__, EXPERTS, "group")
    parser.add_argument("--ranks", type=ranks, default=RANKS, help="a GPU each (%(default)s)")
    parser.add_argument("--model", help="name or folder of real weights, in place of --shape")
    parser.add_argument("--slots", type=int, default=64, help="of each rank")
    parser.add_argument("--clients", type=int, default=768, help="more than slots: a pool")
    parser.add_argument("--requests", type=int, default=3000, help="of each way and round")
    parser.add_argument("--max-tokens", type=int, default=400, help="where outputs are cut")
    trace = names_of(BUNDLED, files=True, several=False)
    parser.add_argument("--trace", default="burstgpt", type=trace)
    parser.add_argument("--rounds", type=int, default=3)
    measure_with(parser, measure)


def ranks(text: str) -> int:
    """How many there are."""
    with contextlib.suppress(ValueError):
        if int(text) > 1:
            return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} should be 2 or more: one rank waits for nobody")


def measure(where: Machine, given: argparse.Namespace) -> list[str]:
    """Every load and every round, as far as the time goes; what is missing still."""
    asked = ("ranks", "slots", "clients", "requests", "max_tokens", "trace")
    settings = {
        **where.settings,
        **{key: getattr(given, key) for key in asked},
        "expert_parallel": not where.cpu,
        "lengths": f"hidden: every request asks for {given.max_tokens} tokens at most",
    }
    parts = Parts(given.out / FILE, settings, figures)
    wanted = {POWER: LOADS, ROUNDS: [str(number + 1) for number in range(given.rounds)]}
    left = {part: parts.missing(part, names) for part, names in wanted.items()}
    if any(left.values()):
        budget = Budget(given.limit_s, {"all": 1.0})
        with (
            starting(COMPILE, 0, given.out / "compile.log") as compiling,
            running_group(where, parts, given) as (group, log),
        ):
            for load in budget.within("all", left[POWER]):
                with contextlib.suppress(NeverSeenError):
                    parts.keep(POWER, load, hold(group, log, load, holding(where, given)))
            compiling.process.wait()
            for number in whole_rounds(budget, left[ROUNDS]):
                parts.keep(ROUNDS, number, a_round(group, log, int(number), given))
    tell(parts)
    return [f"{part}: {name}" for part in wanted for name in parts.missing(part, wanted[part])]


def holding(where: Machine, given: argparse.Namespace) -> Holding:
    """Long enough for a GPU's power to settle."""
    return Holding(given.slots, 512, 1.0) if where.cpu else Holding(given.slots, 8192, 12.0)


@contextlib.contextmanager
def running_group(
    where: Machine, parts: Parts, given: argparse.Namespace
) -> Iterator[tuple[Engine, SnapshotLog]]:
    """The ranks behind their front end, the first slow steps behind them, and what they tell."""
    flags = (
        *("--max-num-seqs", str(given.slots), "--max-model-len", str(CONTEXT_TOKENS)),
        *("--max-num-batched-tokens", str(CHUNK_TOKENS), *GPU_FLAGS * (not where.cpu)),
    )
    with engine(where, "group", *flags, hidden_lengths=True) as group:
        parts.begin(machine_facts(where, group.server), where.commit)
        with reading(group.endpoints) as log:
            for rank in range(group.ranks):
                group.decode_together(given.slots, 256, 16, rank)
            log.rest(given.slots * group.ranks)
            yield group, log


def whole_rounds(budget: Budget, numbers: Sequence[str]) -> Iterator[str]:
    """Those for which there is time, by what the one before took."""
    took_s = 0.0
    for number in budget.within("all", numbers):
        if budget.left_s("all") < took_s:
            return
        began_s = time.monotonic()
        yield number
        took_s = time.monotonic() - began_s


def a_round(
    group: Engine, log: SnapshotLog, number: int, given: argparse.Namespace
) -> dict[str, Any]:
    """All ways in turn, with the same requests."""
    first = (number - 1) % len(WAYS)
    return {way: replay(group, log, way, number, given) for way in (*WAYS[first:], *WAYS[:first])}


def replay(
    group: Engine, log: SnapshotLog, way: str, seed: int, given: argparse.Namespace
) -> dict[str, Any]:
    """One replay in one way, from rest to rest."""
    flags = ["--trace", given.trace, "--arrivals", f"closed:{given.clients}"]
    flags += ["--requests", str(given.requests), "--max-tokens", str(given.max_tokens)]
    with entrance(group, way, given.out) as server:
        log.drop()
        ended, before = log.ended, last(log)
        router = [] if way == BALANCER else [server.process.pid]
        router_s, client_s = cpu_s(router), _children_s()
        report = run_replay(server.url, given.out / "replay.json", *flags, "--seed", str(seed))
        log.rest(ended + report["completed"])
        router_s, client_s = cpu_s(router) - router_s, _children_s() - client_s
    steps = log.ranks()
    joules = energy_j(log, report["start_unix_s"], report["duration"])
    cluster, steady = report["cluster"], report["steady"]
    begin_s = report["start_unix_s"] + steady["start_s"]
    window = group_figures(steps, given.slots, begin_s, begin_s + steady["duration"])
    return {
        **{key: report[key] for key in (*FIGURES, "total_input_tokens")},
        "tokens_computed": sum(step.tokens for rank in steps for step in rank.values()),
        "requests_of_ranks": [sum(one.entered for one in rank.values()) for rank in steps],
        "preemptions": grown(before, last(log), "preemptions_total"),
        "imbalance_tokens": window.imbalance_tokens,
        "mean_load_tokens": window.mean_load_tokens,
        "slot_bubble_steps": window.slot_bubble_steps,
        "step_mean_s": window.step_mean_s,
        "router_imbalance_tokens": cluster and cluster["whole"]["avg_imbalance_tokens"],
        "steady_output_throughput": steady["output_throughput"],
        "energy_j": joules,
        "energy_j_per_output_token": joules and joules / report["total_output_tokens"],
        "mean_power_w": joules and joules / report["duration"] / group.ranks,
        "client_cores": client_s / report["duration"],
        "router_cores": router_s / report["duration"],
    }


@contextlib.contextmanager
def entrance(group: Engine, way: str, folder: Path) -> Iterator[Server]:
    """Where requests are sent: to the front end, or to a router that knows the ranks."""
    if way == BALANCER:
        yield group.server
        return
    workers = [
        f"--worker={group.server.url},rank={rank},snapshots={endpoint}"
        for rank, endpoint in enumerate(group.endpoints)
    ]
    with running_router(folder, *workers, "--policy", way) as router:
        wait_known(router)
        yield router


def energy_j(log: SnapshotLog, begin_s: float, duration_s: float) -> float | None:
    """Of all ranks' GPUs in that time; None if one of them does not tell."""
    grown_j = 0.0
    for told in log.snapshots:
        first, end = (_energy_at(told, at_s) for at_s in (begin_s, begin_s + duration_s))
        if first is None or end is None:
            return None
        grown_j += end - first
    return grown_j


def _energy_at(told: Sequence[Snapshot], at_s: float) -> float | None:
    """What a rank told last before a time."""
    before = [one.energy_j for one in told if one.time_s <= at_s]
    return before[-1] if before else None


def _children_s() -> float:
    """CPU seconds of all processes that this one has seen end."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# --- figures --------------------------------------------------------------------------------------


def figures(parts: Mapping[str, Values]) -> tuple[Values, Values]:
    """Medians of each way, its ratios to vLLM's balancer, and what a waiting GPU draws."""
    rounds = list(parts.get(ROUNDS, {}).values())
    return {}, {
        "ways": {way: medians([one[way] for one in rounds]) for way in WAYS if rounds},
        "ratios": {way: ratios(rounds, way) for way in WAYS[1:] if rounds},
        "power_of_a_gpu": power_figures(parts.get(POWER, {})),
    }


def medians(runs: Sequence[Values]) -> dict[str, Any]:
    """Of one way's runs; how many requests were answered and failed in all of them."""
    known_ = {key: [run[key] for run in runs if run[key] is not None] for key in MEDIANS}
    return {
        "rounds": len(runs),
        **{key: sum(run[key] for run in runs) for key in ("completed", "failed", "preemptions")},
        **{key: statistics.median(told) if told else None for key, told in known_.items()},
    }


def ratios(rounds: Sequence[Values], way: str) -> dict[str, Any]:
    """Each round's, to vLLM's balancer in the same round, and their median."""
    found = {}
    for key in RATIOS:
        pairs = [(one[way][key], one[BALANCER][key]) for one in rounds]
        each = [own / other for own, other in pairs if own is not None and other]
        found[key] = {"median": statistics.median(each), "rounds": each} if each else None
    return found


def tell(parts: Parts) -> None:
    """Write the medians for the user at the terminal."""
    found = figures({part: parts.of(part) for part in (POWER, ROUNDS)})[1]
    for way, row in found["ways"].items():
        told = ", ".join(f"{key} {row[key]:.5g}" for key in RATIOS if row[key] is not None)
        say(f"{way}: {row['completed']} answered, {row['failed']} failed; {told}")
    say(f"power of a GPU: {found['power_of_a_gpu']}")
