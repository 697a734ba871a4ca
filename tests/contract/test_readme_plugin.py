"""What the README says the plug-in costs is what is kept of the last measurement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.bench.bench_plugin import share, table

ROOT = Path(__file__).resolve().parents[2]
SECTION = ((ROOT / "README.md").read_text().partition("\n## The vLLM plug-in\n")[2]).partition(
    "\n## "
)[0]
KEPT: dict[str, Any] = json.loads((ROOT / "tests/data/plugin/cost.json").read_text())


def test_the_table_is_what_was_measured() -> None:
    rows = [line for line in SECTION.splitlines() if "Scheduler` | " in line]
    assert rows == table(KEPT["schedulers"]["rows"])


def test_an_engines_steps_are_what_was_measured() -> None:
    words = " ".join(SECTION.split())
    engine = KEPT["engine"]
    assert f"{share(engine['wall'])} more by the clock and {share(engine['cpu'])} in CPU" in words
    assert f"load average of {between(engine['load_averages'])}" in words
    assert (
        f"without it one's steps took {between(engine['wall']['runs_us']['neither'])} us" in words
    )


def between(values: list[float]) -> str:
    return f"{min(values):.0f} to {max(values):.0f}"
