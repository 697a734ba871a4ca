"""What a laboratory runs: a simulation, and how often it is repeated."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol, Self

from loadgen.figures.fingerprints import Code
from loadgen.figures.samples import Key

SEEDS = 5
QUICK_SEEDS = 2
QUICK_SHARE = 25

Run = dict[str, Any]


class Trial(Protocol):
    """One row of a study."""

    @property
    def key(self) -> Key:
        """Unlike all others of the study."""
        ...

    @property
    def seeds(self) -> int:
        """Repetitions, with the seeds 0, 1, ..."""
        ...

    @property
    def metrics(self) -> Collection[str]:
        """Keys that each run has; what else it has depends on what is simulated."""
        ...

    @property
    def command(self) -> str | None:
        """What repeats the first seed; None where flags cannot say it."""
        ...

    @property
    def differs(self) -> Mapping[str, object]:
        """Settings that are not the defaults of the simulation."""
        ...

    @property
    def code(self) -> Code:
        """Modules that a run goes through."""
        ...

    def depends_on(self, seed: int) -> list[object]:
        """All that a run follows from, but the code."""
        ...

    def run(self, seed: int) -> Run:
        """One simulation, JSON-able; ``records`` are the steps of one whose records are kept."""
        ...

    def shortened(self) -> Self:
        """A ``QUICK_SHARE``-th of it, ``QUICK_SEEDS`` times at most."""
        ...
