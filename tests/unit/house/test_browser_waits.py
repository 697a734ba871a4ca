"""Waiting for what a page shows while it gives way to the next page."""

from typing import Any

import pytest

from tests.support.browser import BrowserError, NavigatedError, Page


class Leaving(Page):
    """A page that is left twice while it is asked."""

    def __init__(self) -> None:
        self.answers: list[Any] = [NavigatedError("left"), None, NavigatedError("left"), "there"]

    def evaluate(self, expression: str) -> Any:
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_the_next_page_may_have_it() -> None:
    assert Leaving().wait_for("x") == "there"


def test_what_never_comes_is_an_error() -> None:
    page = Leaving()
    page.answers.clear()
    with pytest.raises(BrowserError, match=r"not so within 0\.2 s: x"):
        page.wait_for("x", 0.2)
