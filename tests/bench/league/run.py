"""The league: every entrant before every workload, part by part; goes on where it ended."""

import argparse
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from deploy.engine.build import BuildError
from loadgen.report.origin import commit
from router.core.errors import EvenstepError
from tests.bench.league.entrant import Entrant
from tests.bench.league.entrants import ENTRANTS
from tests.bench.league.page import places, summarize, tables_of
from tests.bench.league.parts import DATA, is_due, keep, kept_parts, measured
from tests.bench.league.pins import PEERS
from tests.bench.league.workloads import WORKLOADS, Workload

QUICK_WORKLOADS = ("open-80", "chat")
QUICK_ENTRANTS = (
    "vllm-router cache_aware",
    "vllm-router power_of_two",
    "envoy least_request",
    "evenstep",
)
# An entrant that fails so often does not start here.
_MOST_FAILURES = 2


def parts_of(
    entrants: Sequence[Entrant], workloads: Sequence[Workload], seeds: int
) -> Iterator[tuple[Entrant, Workload, int]]:
    """Seed by seed; every other seed has the entrants in the other order."""
    for seed in range(seeds):
        for workload in workloads:
            for entrant in reversed(entrants) if seed % 2 else entrants:
                if workload.name not in entrant.cannot:
                    yield entrant, workload, seed


def run(
    entrants: Sequence[Entrant],
    workloads: Sequence[Workload],
    seeds: int,
    minutes: float,
    folder: Path = DATA,
) -> int:
    """Measure the parts that are due, until the time is over; how many failed."""
    end_s, at = time.monotonic() + 60 * minutes, commit()
    failures = Counter[str]()
    for entrant, workload, seed in parts_of(entrants, workloads, seeds):
        if time.monotonic() > end_s:
            print("the time is over; the same command goes on")
            break
        if failures[entrant.name] >= _MOST_FAILURES:
            continue
        if not is_due(entrant, workload, seed, kept_parts(workload.name, folder)):
            continue
        began_s = time.monotonic()
        print(f"{workload.name}, seed {seed}, {entrant.name}: ", end="", flush=True)
        try:
            with tempfile.TemporaryDirectory(prefix="evenstep-league-") as scratch:
                part = measured(entrant, workload, seed, Path(scratch))
        except (BuildError, EvenstepError, OSError, RuntimeError, ValueError) as error:
            failures[entrant.name] += 1
            print(f"failed: {error}", flush=True)
            traceback.print_exc()
            continue
        keep(entrant, workload, seed, part, at, folder)
        print(_line(part[0], time.monotonic() - began_s), flush=True)
    return failures.total()


def _line(found: Mapping[str, object], wall_s: float) -> str:
    shown = [
        f"{name} {found[key]:.4g}"
        for name, key in (
            ("TTFT ms", "mean_ttft_ms"),
            ("TPOT ms", "mean_tpot_ms"),
            ("tok/s", "tokens_per_s"),
            ("hits", "hit_share"),
            ("idle", "idle_share"),
            ("good", "good_share"),
            ("failed", "failed"),
            ("router CPU s", "router_cpu_s"),
            ("late ms", "client_late_p99_wall_ms"),
            ("steps late", "steps_late_mean"),
        )
        if isinstance(found.get(key), int | float)
    ]
    busy = ", the machine was busy" if found["busy"] else ""
    return f"{', '.join(shown)}; {wall_s:.0f} s{busy}"


def _names(text: str) -> Sequence[str]:
    return [name.strip() for name in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.league")
    parser.add_argument("--quick", action="store_true", help="four entrants, two workloads, a seed")
    parser.add_argument("--workloads", type=_names, metavar="NAME,…")
    parser.add_argument("--entrants", type=_names, metavar="NAME,…")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--minutes", type=float, default=600.0, help="begins no part after them")
    given = parser.parse_args()
    known = ENTRANTS
    names = given.entrants or (QUICK_ENTRANTS if given.quick else [*known])
    loads = given.workloads or (QUICK_WORKLOADS if given.quick else [*WORKLOADS])
    for name, among in (*((name, known) for name in names), *((load, WORKLOADS) for load in loads)):
        if name not in among:
            parser.error(f"{name!r} is none of {', '.join(among)}")
    for load in loads:
        print(f"{load}: time scale {WORKLOADS[load].time_scale:g}; {WORKLOADS[load].what}")
    try:
        failed = run(
            [known[name] for name in names],
            [WORKLOADS[load] for load in loads],
            given.seeds or (1 if given.quick else 3),
            given.minutes,
        )
    finally:
        left_out = {each.name: dict(each.cannot) for each in known.values() if each.cannot}
        summarize(
            left_out | {name: {"all": peer.cannot} for name, peer in PEERS.items() if peer.cannot}
        )
    print("\nWhere evenstep is behind comes first:")
    for row in places(tables_of()):
        print(" | ".join(row))
    raise SystemExit(1 if failed else 0)
