"""What its page says that the status page costs is what was measured."""

import json
from pathlib import Path
from typing import Any

from tests.support.docs import section_of, words

ROOT = Path(__file__).resolve().parents[2]
PAGE = "docs/status-page.md"
SECTION = words(section_of(PAGE, "The status page"))
COST: dict[str, Any] = json.loads((ROOT / "tests/data/page/cost.json").read_text())


def test_figures_are_those_of_the_kept_run() -> None:
    page, tokens = COST["page"], COST["tokens"]
    pairs = tokens["ratio_of_each_pair"]

    assert f"{page['state_cpu_ms']:.2f} ms" in SECTION
    assert f"{page['state_bytes'] / 1000:.0f} kB" in SECTION
    assert f"{100 * page['cpu_share_more']:.1f} % of a core" in SECTION
    assert f"{100 * page['chromium_cpu_share']:.0f} % of a core" in SECTION
    assert f"x {tokens['ratio']:.3f} ({min(pairs):.2f} to {max(pairs):.2f}" in SECTION
    assert f"{tokens['us_per_token_alone']:.0f} µs" in SECTION


def test_what_was_asked_is_met() -> None:
    assert COST["page"]["cpu_share_more"] < 0.05
    assert COST["tokens"]["ratio"] < 1.03
