"""Values that other parts check, with their errors as pydantic wants them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from router.errors import ConfigError

T = TypeVar("T")
U = TypeVar("U")


def checked(read: Callable[[T], U], value: T) -> U:
    """What is read, with errors in the form that pydantic expects."""
    try:
        return read(value)
    except ConfigError as error:
        raise ValueError(str(error)) from None
