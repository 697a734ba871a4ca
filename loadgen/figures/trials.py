"""Trials: simulations with their repetitions, mostly runs of a command."""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, ClassVar, Generic, Self, TypeVar

from loadgen.figures.samples import Key

SEEDS = 5
QUICK_SEEDS = 2
QUICK_SHARE = 25

Run = dict[str, Any]
Options = TypeVar("Options", bound=Any)


@dataclass(frozen=True, slots=True)
class Trial(ABC):
    """One row of a study, repeated with the seeds 0, 1, ...

    Attributes:
        metrics: keys that each run has.
        code: files and folders that decide a run.
    """

    key: Key  # unique in the study
    seeds: int = field(default=SEEDS, kw_only=True)

    @property
    @abstractmethod
    def metrics(self) -> Sequence[str]: ...

    @property
    @abstractmethod
    def code(self) -> Sequence[str]: ...

    @property
    @abstractmethod
    def command(self) -> str | None:
        """Command that repeats the first seed; None if flags cannot express it."""

    @property
    @abstractmethod
    def differs(self) -> Mapping[str, object]:
        """Settings that are not the simulation's defaults."""

    @abstractmethod
    def depends_on(self, seed: int) -> list[object]:
        """All that a run depends on, except the code."""

    @abstractmethod
    def run(self, seed: int) -> Run:
        """One simulation, JSON-able; ``records`` are the steps, if kept."""

    def shortened(self) -> Self:
        """A ``QUICK_SHARE``-th of it, with at most ``QUICK_SEEDS`` repetitions."""
        return replace(self, seeds=min(self.seeds, QUICK_SEEDS))


@dataclass(frozen=True, slots=True)
class CommandTrial(Trial, Generic[Options]):
    """A run of a command."""

    options: Options  # dataclass of its options, whose seed is replaced

    name: ClassVar[str]  # words of the command
    # Options that are shown even where they are the defaults, first.
    always: ClassVar[tuple[str, ...]]

    @property
    def command(self) -> str | None:
        words = (f"--{n.replace('_', '-')} {shlex.quote(str(v))}" for n, v in self.differs.items())
        return " ".join([f"evenstep {self.name}", *words])

    @property
    def differs(self) -> Mapping[str, object]:
        options, default = self.seeded(0), type(self.options)()
        given = {each.name: getattr(options, each.name) for each in fields(options)}
        differing = [name for name, value in given.items() if value != getattr(default, name)]
        names = dict.fromkeys((*self.always, *differing))
        return {n: given[n].value if isinstance(given[n], Enum) else given[n] for n in names}

    def depends_on(self, seed: int) -> list[object]:
        return [self.seeded(seed).config().described()]

    def seeded(self, seed: int) -> Options:
        """Options of one run."""
        seeded: Options = replace(self.options, seed=seed)
        return seeded

    def shorter(self, **options: int) -> Self:
        """With these options, and few seeds."""
        options_ = replace(self.options, **options)
        return replace(self, options=options_, seeds=min(self.seeds, QUICK_SEEDS))
