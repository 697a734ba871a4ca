"""The type of a trial: a simulation with its repetitions."""

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
        """Unique key in the study."""
        ...

    @property
    def seeds(self) -> int:
        """Number of repetitions, with the seeds 0, 1, ..."""
        ...

    @property
    def metrics(self) -> Collection[str]:
        """Keys that each run has; further keys depend on the simulation."""
        ...

    @property
    def command(self) -> str | None:
        """Command that repeats the first seed; None if flags cannot express it."""
        ...

    @property
    def differs(self) -> Mapping[str, object]:
        """Settings that are not the simulation's defaults."""
        ...

    @property
    def code(self) -> Code:
        """Modules that a run uses."""
        ...

    def depends_on(self, seed: int) -> list[object]:
        """All that a run depends on, except the code."""
        ...

    def run(self, seed: int) -> Run:
        """One simulation, JSON-able; ``records`` are the steps, if kept."""
        ...

    def shortened(self) -> Self:
        """A ``QUICK_SHARE``-th of it, with at most ``QUICK_SEEDS`` repetitions."""
        ...
