"""What the page says of real ranks in lockstep is what is kept of the last measurement."""

import json
from pathlib import Path
from typing import Any

from docs.engine_tables import lockstep
from tests.support.docs import text_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = "docs/results/lockstep.md"
SECTION = text_of(PAGE)
KEPT: dict[str, Any] = json.loads((ROOT / "tests/data/lockstep/lockstep.json").read_text())


def test_the_table_is_what_was_measured() -> None:
    shown = [line for line in SECTION.splitlines() if line.startswith("|")]
    assert shown == lockstep(KEPT["ways"]).markdown().splitlines()


def test_the_measurement_shows_what_is_claimed() -> None:
    rows = [one for seeds in KEPT["ways"].values() for one in seeds]
    assert {(one["failed"], one["overtakings"]) for one in rows} == {(0, 0)}
    assert KEPT["barrier"]["overtakings"] == 0
