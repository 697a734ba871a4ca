"""One part of the league: a workload of one seed before one entrant."""

import contextlib
import json
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import Any

import uvloop

from docs.stale_figures import changed
from loadgen.emulator.record import read_record
from loadgen.report.origin import EMULATION, KEY, ROOT, Document, origin
from loadgen.report.origin import Engines as Physics
from loadgen.run.child_processes import Child, free_ports
from router.core.errors import EvenstepError
from router.core.step_time import numbers
from tests.bench.league.client import Client, Figures, Place, counters, figures
from tests.bench.league.entrant import Engines, Entrant, Running
from tests.bench.league.pins import PEERS
from tests.bench.league.workloads import KEYS, Workload
from tests.support.figure_files import write_part
from tests.support.router_bench.targets import cpu_s, memory_mb

DATA = ROOT / "tests/data/league"
# What counts as figures of real engines, and of emulated ones. Of the router's packages those files
# are named that the client and the engines run themselves: with more, figures of other products
# would count as stale whenever evenstep changes.
CLIENT = (
    *(f"tests/bench/league/{name}.py" for name in ("client", "parts", "starting")),
    *(f"loadgen/replay/{name}.py" for name in ("replay_results", "replayer", "stream")),
    *(f"router/engines/{name}.py" for name in ("http_client", "engine_connection", "time_limit")),
)
CODE = (
    *EMULATION,
    *(f"router/core/{name}.py" for name in ("kv_blocks", "step_time", "types", "wire")),
    "router/core/prefix/ids.py",
    *(f"tests/bench/league/{name}.py" for name in ("rendering", "numbering")),
    *CLIENT,
)
OURS = "evenstep"
# A run counts as disturbed by a busy machine beyond these: how late requests were sent (99th
# percentile, wall time), and how late steps ended (mean over time, as a share of their length).
# Late steps make engines slower by that share: beyond what counts as level in the standings, the
# machine would decide places.
CLIENT_LATE_MS, STEPS_LATE = 25.0, 0.03
_READY_S = 60.0
_LONGEST_S = 540.0


def timeout_s(workload: Workload) -> float:
    """Wall seconds after which open answers count as lost; a part of emulated engines is short."""
    enough = 3 * workload.engine_s * workload.time_scale + 30
    return min(enough, _LONGEST_S) if workload.fleet else enough


EnginesOf = Callable[[Workload, int, Path], AbstractContextManager[tuple[Engines, Any]]]
"""Engines of a workload and seed, with files in a folder, and their physics; None: real ones."""


@contextlib.contextmanager
def emulated(workload: Workload, seed: int, folder: Path) -> Iterator[tuple[Engines, Any]]:
    """Fresh ones; their record is ``record.csv.gz``."""
    ranks = workload.ranks
    first = free_ports(4 * ranks + 1)  # HTTP, the fault port, two of state, one of KV events
    ready = folder / "fleet.json"
    step_time = dict(pairwise(workload.fleet))["--step-time"]
    flags = [
        *("-m", "tests.bench.league.rendering", "emulate"),
        *("--workers", str(ranks), "--slots", str(workload.slots)),
        *("--port", str(first), "--kv-events-port", str(first + 3 * ranks + 1)),
        *("--time-scale", f"{workload.time_scale:g}", "--seed", str(seed)),
        *("--record", str(folder / "record.csv.gz"), "--json", str(ready)),
        *workload.fleet,
    ]
    with Child(flags, folder / "fleet.log", sys.executable) as child:
        child.until(lambda: ready.exists() or None, _READY_S)
        told = json.loads(ready.read_bytes())
        yield (
            Engines(
                urls=[each["url"] for each in told["workers"]],
                workers=[each["spec"] for each in told["workers"]],
                kv_events=range(first + 3 * ranks + 1, first + 4 * ranks + 1),
                slots=workload.slots,
                block_tokens=told["engines"]["block_tokens"],
                model=told["model"],
                time_scale=workload.time_scale,
                step_time=numbers("--step-time", step_time),
                control=told["control"],
            ),
            told["engines"],
        )


def measured(
    entrant: Entrant, workload: Workload, seed: int, folder: Path, engines_of: EnginesOf = emulated
) -> tuple[Figures, Any]:
    """Figures of a part, and the engines' physics."""
    sessions, load = workload.sessions(seed), os.getloadavg()[0]
    with engines_of(workload, seed, folder) as (engines, physics):
        before = uvloop.run(counters(engines.urls))
        with _keys(workload), entrant.start(engines, folder) as router:
            used_s = cpu_s(router.pids())
            place = Place(
                router.url,
                engines.urls,
                engines.control,
                engines.model,
                engines.hidden_lengths,
                f"{secrets.token_hex(8)} " if engines.used else "",
            )
            client = Client(workload, place)
            sent = uvloop.run(client.run(sessions, timeout_s(workload)))
            if len(sent.results) < (planned := sum(map(len, sessions))):
                raise RuntimeError(f"only {len(sent.results)} of {planned} requests were sent")
            cost = {
                "router_cpu_s": cpu_s(router.pids()) - used_s,
                "router_memory_mb": _memory_mb(router),
                "evidence": _evidence(router),
            }
        after = uvloop.run(counters(engines.urls))
    counted = [end - begin for begin, end in zip(before, after, strict=True)]
    record = folder / "record.csv.gz"
    steps = read_record(record) if record.exists() else []
    found = figures(workload, sent, steps, counted)
    late = found["client_late_p99_wall_ms"] > CLIENT_LATE_MS
    return (
        {
            "flags": entrant.flags,
            "what": entrant.what,
            "packages": packages_of(entrant),
            "requests_are": workload.fingerprint(seed),
            "time_scale": workload.time_scale,
            **found,
            **cost,
            "load_before_after": [round(load, 2), round(os.getloadavg()[0], 2)],
            "busy": bool(late or found.get("steps_late_mean", 0.0) > STEPS_LATE),
        },
        physics,
    )


@contextlib.contextmanager
def _keys(workload: Workload) -> Iterator[None]:
    """Where there are tenants, evenstep knows their keys."""
    if not workload.tenants:
        yield
        return
    keys = ";".join(f"{tenant} {key}" for tenant, key in KEYS.items())
    before = os.environ.get("EVENSTEP_API_KEYS")
    os.environ["EVENSTEP_API_KEYS"] = keys
    try:
        yield
    finally:
        os.environ.pop("EVENSTEP_API_KEYS")
        if before is not None:
            os.environ["EVENSTEP_API_KEYS"] = before


def _memory_mb(router: Running) -> float | None:
    with contextlib.suppress(OSError):  # one of its processes has just ended
        return memory_mb(router.pids())
    return None


def _evidence(router: Running) -> Mapping[str, float] | str:
    try:
        return dict(router.evidence())
    except (ArithmeticError, EvenstepError, LookupError, OSError, ValueError) as error:
        # A router's own figures are no reason to lose the run's.
        return repr(error)[:200]


def packages_of(entrant: Entrant) -> list[str]:
    """Names and versions of what is installed of a peer; none of evenstep."""
    return list(PEERS[entrant.peer].packages) if entrant.peer in PEERS else []


# --- kept parts -----------------------------------------------------------------------------------


def part_name(entrant: str, seed: int) -> str:
    return f"{entrant}, seed {seed}"


def kept_parts(workload: str, folder: Path = DATA) -> dict[str, Document]:
    """Parts of a workload by their names."""
    file = folder / f"{workload}.json"
    found: dict[str, Document] = json.loads(file.read_bytes()) if file.exists() else {}
    return found


def is_due(entrant: Entrant, workload: Workload, seed: int, kept: Mapping[str, Document]) -> bool:
    """Whether a part is missing, stale, or of other requests, flags or versions."""
    part = kept.get(part_name(entrant.name, seed))
    if part is None or changed(part[KEY]):
        return True
    told = part["flags"], part["packages"], part["requests_are"]
    return told != (entrant.flags, packages_of(entrant), workload.fingerprint(seed))


def was_disturbed(entrant: Entrant, seed: int, kept: Mapping[str, Document]) -> bool:
    """Whether the machine was busy during a part that is kept."""
    return bool(kept.get(part_name(entrant.name, seed), {}).get("busy"))


def keep(
    entrant: Entrant,
    workload: Workload,
    seed: int,
    part: tuple[Figures, Any],
    commit: str,
    folder: Path = DATA,
) -> None:
    """Write a part; ``commit``: at the start, before parts changed the clone."""
    found, physics = part
    kind = Physics.REAL if physics is None else Physics.EMULATED
    header = origin(kind, (*entrant.code, *(CODE if physics else CLIENT)), physics)
    header |= {"commit": commit}
    folder.mkdir(parents=True, exist_ok=True)
    name = part_name(entrant.name, seed)
    before = kept_parts(workload.name, folder).get(name, {})
    # How often a busy machine made it measure the same again: to choose by that may better figures.
    again = before.get("again", 0) + 1 if before.get("busy") else 0
    file = folder / f"{workload.name}.json"
    write_part(file, name, {**_rounded(found), "again": again}, header)


def _rounded(found: Any) -> Any:
    """Numbers with six digits: there are thousands."""
    if isinstance(found, dict):
        return {key: _rounded(value) for key, value in found.items()}
    return float(f"{found:.6g}") if isinstance(found, float) else found
