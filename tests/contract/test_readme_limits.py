"""The README's limits are those that hold when nothing else is said."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

from router.http.limits import HttpLimits
from router.proxy.parse import DEFAULT_LIMITS
from router.settings.sources import flag_name
from tests.support.malformed import MALFORMED

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
SECTION = README.partition("\n### What a client may send\n")[2].partition("\n### ")[0]


def test_the_limits_are_those_in_force() -> None:
    shown = dict(re.findall(r"^\| `(--[a-z-]+)` \| ([\d,]+)(?: s)? \|", SECTION, re.MULTILINE))

    limits = asdict(HttpLimits()) | asdict(DEFAULT_LIMITS)
    assert {name: float(value.replace(",", "")) for name, value in shown.items()} == {
        flag_name(setting): float(value) for setting, value in limits.items()
    }


def test_as_many_requests_are_refused_as_it_says() -> None:
    assert f"{len(MALFORMED)} malformed requests" in SECTION
