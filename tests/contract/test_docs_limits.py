"""The limits of the page are those that hold when nothing else is said."""

import re
from dataclasses import asdict

from router.config.setting_sources import flag_name
from router.core.request_limits import DEFAULT_LIMITS
from router.http.port import HttpLimits
from tests.support.docs import section_of, words
from tests.support.malformed import MALFORMED

PAGE = "docs/http-api.md"
SECTION = section_of(PAGE, "What a client may send")


def test_the_limits_are_those_in_force() -> None:
    shown = dict(re.findall(r"^\| `(--[a-z-]+)` \| ([\d,]+)(?: s)? \|", SECTION, re.MULTILINE))

    limits = asdict(HttpLimits()) | asdict(DEFAULT_LIMITS)
    assert {name: float(value.replace(",", "")) for name, value in shown.items()} == {
        flag_name(setting): float(value) for setting, value in limits.items()
    }


def test_as_many_requests_are_refused_as_it_says() -> None:
    assert f"{len(MALFORMED)} malformed requests" in words(SECTION)
