"""Values that other parts check, with their errors as pydantic wants them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from router.errors import ConfigError

# The shortest time: the event loop tells no shorter ones apart, and work repeated more often leaves
# time for nothing else. The longest is a week: a longer one is a typing error.
MOMENT_S, HOUR_S, DAY_S, WEEK_S = 0.001, 3_600, 86_400, 604_800

T = TypeVar("T")
U = TypeVar("U")


def checked(read: Callable[[T], U], value: T) -> U:
    """What is read, with errors in the form that pydantic expects."""
    try:
        return read(value)
    except ConfigError as error:
        raise ValueError(str(error)) from None
