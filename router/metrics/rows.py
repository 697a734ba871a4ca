from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from router.core.stats import GroupStats, Histogram

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row(Generic[T]):
    """One metric of a table's subjects; a name that ends in ``_total`` is a counter's.

    ``read`` returns the value, None for no sample; with a ``label`` the values by it.
    """

    name: str
    help: str
    read: Callable[[T], float | Mapping[str, float] | None]
    label: str | None = None

    @property
    def is_counter(self) -> bool:
        return self.name.endswith("_total")


@dataclass(frozen=True, slots=True)
class HistogramRow:
    """One histogram of each group."""

    name: str
    help: str
    read: Callable[[GroupStats], Histogram]
