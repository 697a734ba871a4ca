"""Checks by other parts of the router, with errors as pydantic expects them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from router.core.errors import ConfigError

# The event loop's resolution is the shortest time; a faster repetition would leave time for nothing
# else. A time over a week is a typing error.
MOMENT_S, HOUR_S, DAY_S, WEEK_S = 0.001, 3_600, 86_400, 604_800

T = TypeVar("T")
U = TypeVar("U")


def checked(read: Callable[[T], U], value: T) -> U:
    """Call ``read``; convert its ConfigError to the ValueError that pydantic expects."""
    try:
        return read(value)
    except ConfigError as error:
        raise ValueError(str(error)) from None
