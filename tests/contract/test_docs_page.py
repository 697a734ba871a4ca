"""The status page costs as little as was wanted."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COST: dict[str, Any] = json.loads((ROOT / "tests/data/page/cost.json").read_text())


def test_what_was_asked_is_met() -> None:
    assert COST["page"]["cpu_share_more"] < 0.05
    assert COST["tokens"]["ratio"] < 1.03
