"""Row of a metrics table, and the subjects that rows are read from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from router.core.rounds.decider import Decider
from router.core.state.group import Group
from router.core.state.worker import Worker
from router.core.stats import GroupStats

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


@dataclass(frozen=True, slots=True)
class GroupReading:
    """A group at the moment of a scrape."""

    decider: Decider

    @property
    def group(self) -> Group:
        return self.decider.group

    @property
    def stats(self) -> GroupStats:
        return self.decider.stats


@dataclass(frozen=True, slots=True)
class WorkerReading:
    """A worker at the moment of a scrape."""

    worker: Worker
    now_s: float
