"""Row of a metrics table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row(Generic[T]):
    """One metric.

    Attributes:
        name: full name; a name that ends in ``_total`` is a counter.
        help: help text for a first-time reader.
        read: returns the value; None: no sample.
    """

    name: str
    help: str
    read: Callable[[T], float | None]
