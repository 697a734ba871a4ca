from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from router.core.stats import GroupStats, Histogram

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row(Generic[T]):
    """One metric of a table's subjects.

    ``read`` returns the value, None for no sample; with a ``label`` the values by it.
    """

    help: str
    read: Callable[[T], float | Mapping[str, float] | None]
    label: str | None = None


# By name; one that ends in ``_total`` is a counter's.
Table = Mapping[str, Row[T]]


@dataclass(frozen=True, slots=True)
class HistogramRow:
    """One histogram of each group."""

    help: str
    read: Callable[[GroupStats], Histogram]
