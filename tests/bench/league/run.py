"""The league: every entrant before every workload, part by part; goes on where it ended."""

import argparse
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from deploy.engine.build import BuildError
from loadgen.report.origin import commit
from router.core.errors import EvenstepError
from tests.bench.league import real
from tests.bench.league.entrant import Entrant
from tests.bench.league.entrants import ENTRANTS, ONCE, ONCE_IN
from tests.bench.league.page import league_text, summarize
from tests.bench.league.parts import (
    DATA,
    EnginesOf,
    emulated,
    is_due,
    keep,
    kept_parts,
    measured,
    was_disturbed,
)
from tests.bench.league.pins import PEERS
from tests.bench.league.places import losses
from tests.bench.league.standings import tables_of
from tests.bench.league.workloads import WORKLOADS, Workload

OUT = Path("out/league")
QUICK_WORKLOADS = ("open-80", "chat")
QUICK_ENTRANTS = (
    "vllm-router cache_aware",
    "vllm-router power_of_two",
    "envoy least_request",
    "evenstep",
)
# An entrant that fails so often does not start here.
_MOST_FAILURES = 2
_ERRORS = (
    *(BuildError, EvenstepError, ExceptionGroup, httpx.HTTPError),
    *(LookupError, OSError, RuntimeError, ValueError),
)


Part = tuple[Entrant, Workload, int]
"""The int is a seed."""


def parts_of(
    entrants: Sequence[Entrant],
    workloads: Sequence[Workload],
    seeds: int,
    once: Collection[str] = ONCE,
) -> Iterator[Part]:
    """Seed by seed; every other seed has the entrants in the other order.

    Args:
        entrants: that run.
        workloads: in which.
        seeds: how many, from 0.
        once: names of those that run with seed 0 in ``ONCE_IN`` alone.
    """
    for seed in range(seeds):
        for workload in workloads:
            for entrant in reversed(entrants) if seed % 2 else entrants:
                more = seed or workload.name not in ONCE_IN
                if workload.name not in entrant.cannot and not (more and entrant.name in once):
                    yield entrant, workload, seed


def _due(wanted: Sequence[Part], folder: Path) -> Iterator[Part]:
    """Parts to measure: what is missing; then, once, those of a machine that was busy."""
    for entrant, workload, seed in wanted:
        if is_due(entrant, workload, seed, kept_parts(workload.name, folder)):
            yield entrant, workload, seed
    for entrant, workload, seed in wanted:
        if was_disturbed(entrant, seed, kept_parts(workload.name, folder)):
            yield entrant, workload, seed


def run(
    wanted: Sequence[Part],
    minutes: float,
    folder: Path = DATA,
    engines_of: EnginesOf = emulated,
) -> int:
    """Measure those parts that are due, until the time is over; how many failed."""
    end_s, at = time.monotonic() + 60 * minutes, commit()
    failures = Counter[str]()
    for entrant, workload, seed in _due(wanted, folder):
        if time.monotonic() > end_s:
            print("the time is over; the same command goes on")
            break
        if failures[entrant.name] >= _MOST_FAILURES:
            continue
        began_s = time.monotonic()
        print(f"{workload.name}, seed {seed}, {entrant.name}: ", end="", flush=True)
        try:
            with tempfile.TemporaryDirectory(prefix="evenstep-league-") as scratch:
                part = measured(entrant, workload, seed, Path(scratch), engines_of)
        except _ERRORS as error:
            failures[entrant.name] += 1
            print(f"failed: {error}", flush=True)
            traceback.print_exc()
            continue
        keep(entrant, workload, seed, part, at, folder)
        print(_line(part[0], time.monotonic() - began_s), flush=True)
    return failures.total()


# --- leagues --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class League:
    """What stands before which engines, and where its figures are kept.

    Attributes:
        entrants: by name.
        workloads: by name.
        folder: of the figures.
        engines_of: of a workload.
        left_out: reasons by entrant and workload.
        page: its page, which it writes itself; None: one of the documentation's.
    """

    entrants: Mapping[str, Entrant]
    workloads: Mapping[str, Workload]
    folder: Path
    engines_of: EnginesOf
    left_out: Mapping[str, Mapping[str, str]]
    page: str | None = None

    def finish(self) -> None:
        """Draw the pictures, and write what is left out, and the page."""
        summarize(self.left_out, self.folder, self.workloads)
        if self.page is not None:
            text = league_text(self.folder, self.workloads, pictures="")
            (self.folder / "league.md").write_text(f"{self.page}\n\n{text}\n", encoding="utf-8")
            print(f"the page: {self.folder / 'league.md'}")


_LEFT_OUT = {each.name: dict(each.cannot) for each in ENTRANTS.values() if each.cannot} | {
    name: {"all": peer.cannot} for name, peer in PEERS.items() if peer.cannot
}
EMULATED = League(ENTRANTS, WORKLOADS, DATA, emulated, _LEFT_OUT)


_ENDS = {
    True: "Answers end at lengths that no router sees.",
    False: "Answers end where the model ends them, at a workload's longest one at most: many are "
    "as long as that, since prompts are words without meaning. With engine_patches.hidden_length "
    "they have the lengths of the traces.",
}


def on_real_engines(urls: str, folder: Path) -> League:
    """Engines that run already; ConfigError: they do not answer, or the folder is of others."""
    cluster = real.cluster(urls)
    print("what the cluster serves, through evenstep: ", end="", flush=True)
    cluster = real.with_capacity(cluster, ENTRANTS["evenstep"], folder)
    print(f"{cluster.requests_per_s:.3g} requests/s", flush=True)
    print(_ENDS[cluster.engines.hidden_lengths], flush=True)
    cannot = {peer: {"all": why} for peer, why in real.CANNOT_PEERS.items()}
    return League(
        {name: each for name, each in ENTRANTS.items() if each.peer not in cannot},
        real.workloads(cluster),
        folder,
        cluster.of,
        {**_LEFT_OUT, **cannot, "every entrant": dict(real.cannot(cluster))},
        f"# League on {', '.join(cluster.engines.urls)}\n\nAt saturation these engines serve "
        f"{cluster.requests_per_s:.3g} requests/s of Azure's conversation lengths, through "
        f"evenstep: open loads are shares of that, and all times of the workloads are "
        f"{cluster.stretch:.3g} times those of emulated engines. "
        f"{_ENDS[cluster.engines.hidden_lengths]}",
    )


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
    parser.add_argument(
        "--urls",
        metavar="'URL,slots=N …'",
        help="engines that run already, as evenstep serve --worker takes them, in place of "
        "emulated ones",
    )
    parser.add_argument("--out", type=Path, default=OUT, help="folder of their figures and page")
    given = parser.parse_args()
    try:
        league = EMULATED if given.urls is None else on_real_engines(given.urls, given.out)
    except EvenstepError as error:
        parser.error(str(error))
    names = given.entrants or (QUICK_ENTRANTS if given.quick else [*league.entrants])
    loads = given.workloads or (QUICK_WORKLOADS if given.quick else [*league.workloads])
    pairs = (
        *((name, league.entrants) for name in names),
        *((load, league.workloads) for load in loads),
    )
    for name, among in pairs:
        if name not in among:
            parser.error(f"{name!r} is none of {', '.join(among)}")
    for load in loads:
        found = league.workloads[load]
        print(f"{load}: time scale {found.time_scale:g}; {found.what}")
    try:
        failed = run(
            [
                *parts_of(
                    [league.entrants[name] for name in names],
                    [league.workloads[load] for load in loads],
                    given.seeds or (1 if given.quick else 3),
                    () if given.entrants else ONCE,
                )
            ],
            given.minutes,
            league.folder,
            league.engines_of,
        )
    finally:
        league.finish()
    print("\nWhere evenstep is behind:")
    for row in losses(tables_of(league.folder, league.workloads)):
        print(" | ".join(row))
    raise SystemExit(1 if failed else 0)
