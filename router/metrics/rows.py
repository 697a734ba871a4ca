"""What a metric is, and what it is read from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from router.decider import Decider
from router.group import Group
from router.stats import GroupStats
from router.worker import Worker

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row(Generic[T]):
    """One metric.

    Attributes:
        name: in full; a name that ends in ``_total`` is a counter's.
        help: what it is, for somebody who sees it for the first time.
        read: its value, None for no sample.
    """

    name: str
    help: str
    read: Callable[[T], float | None]


@dataclass(frozen=True, slots=True)
class GroupReading:
    """A group at the moment of a scrape."""

    decider: Decider

    @property
    def group(self) -> Group:
        """Whose it is."""
        return self.decider.group

    @property
    def stats(self) -> GroupStats:
        """Its counters."""
        return self.decider.stats


@dataclass(frozen=True, slots=True)
class WorkerReading:
    """A worker at the moment of a scrape."""

    worker: Worker
    now_s: float
