"""What the page says the plug-in costs is what is kept of the last measurement."""

import json
from pathlib import Path
from typing import Any

from docs.engine_tables import plugin_cost
from tests.bench.bench_plugin import share
from tests.support.docs import text_of, words

ROOT = Path(__file__).resolve().parents[2]
PAGE = "docs/plugin.md"
SECTION = text_of(PAGE)
KEPT: dict[str, Any] = json.loads((ROOT / "tests/data/plugin/cost.json").read_text())


def test_the_table_is_what_was_measured() -> None:
    rows = [line for line in SECTION.splitlines() if "Scheduler` | " in line]
    assert rows == [f"| {' | '.join(row)} |" for row in plugin_cost().rows]


def test_an_engines_steps_are_what_was_measured() -> None:
    said = words(SECTION)
    engine = KEPT["engine"]
    assert f"{share(engine['wall'])} more by the clock and {share(engine['cpu'])} in CPU" in said
    assert f"load average of {max(engine['load_averages']):.0f} on two cores" in said
    assert f"without it one's steps took {between(engine['wall']['runs_us']['neither'])} us" in said


def between(values: list[float]) -> str:
    return f"{min(values):.0f} to {max(values):.0f}"
