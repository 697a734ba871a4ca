"""A real Chromium, headless; without one a test is skipped, or fails where it is required."""

import os
from collections.abc import Iterator

import pytest

from tests.support.browser import ADVICE, Page, browsing, find


def program() -> str:
    """Path of a Chromium."""
    path = find()
    if path is None:
        if os.environ.get("REQUIRE_CHROMIUM"):
            pytest.fail(ADVICE)
        pytest.skip(ADVICE)
    return path


def tab() -> Iterator[Page]:
    """One tab of a Chromium of its own, of a desk's size; for a fixture."""
    with browsing(program()) as page:
        page.size(1360, 900)
        page.prefer(prefers_color_scheme="light")
        yield page


def press(page: Page, key: str, code: str = "", text: str = "") -> None:
    """Press and release a key."""
    number = {"Tab": 9, "Enter": 13, " ": 32}.get(key, 0)
    common = {"key": key, "code": code or key, "windowsVirtualKeyCode": number}
    down = {"text": text} if text else {}
    page.call("Input.dispatchKeyEvent", type="keyDown", **common, **down)
    page.call("Input.dispatchKeyEvent", type="keyUp", **common)
