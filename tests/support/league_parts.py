"""Parts of the league as a test wants them."""

from pathlib import Path
from typing import Any

from loadgen.report.origin import Engines, origin
from tests.bench.league.parts import part_name
from tests.bench.league.workloads import Workload
from tests.support.figure_files import write_part


def part(workload: Workload, seed: int, **changed: object) -> dict[str, Any]:
    return {
        "flags": "",
        "packages": [],
        "what": "chooses",
        "requests_are": workload.fingerprint(seed),
        "busy": False,
        "completed": 100,
        "failed": 0,
        "mean_ttft_ms": 100.0,
        "tokens_per_s": 10.0,
    } | changed


def kept(folder: Path, workload: Workload, name: str, seed: int, **changed: object) -> None:
    header = origin(Engines.EMULATED, ("tests/bench/league/entrant.py",))
    parts = part(workload, seed, **changed)
    write_part(folder / f"{workload.name}.json", part_name(name, seed), parts, header)
