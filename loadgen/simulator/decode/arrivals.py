"""Requests in the order of their arrival, in virtual time: the same ones for every policy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar, Literal, NamedTuple, Protocol

import numpy as np

from loadgen.simulator.decode.lengths import LengthSource, TraceLengths
from router.core.errors import ConfigError

_BLOCK = 1024
_RATES_PER_S = (1e-9, 1e6)


class Job(NamedTuple):
    """One request as the simulator knows it, its output length included; numbers are unique."""

    number: int
    prompt_tokens: int
    output_tokens: int
    arrival_s: float
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When requests arrive.

    Attributes:
        kind: full: as many wait as are to be kept waiting; poisson: at a rate; trace: at the
            trace's own times.
        rate_per_s: of poisson.
    """

    FORMS: ClassVar[str] = "full|poisson:RATE|trace"

    kind: Literal["full", "poisson", "trace"] = "full"
    rate_per_s: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Arrivals:
        """Read ``full``, ``poisson:RATE`` or ``trace``.

        Raises:
            ConfigError: none of these.
        """
        kind, _, value = text.partition(":")
        if text == "full":
            return cls("full")
        if text == "trace":
            return cls("trace")
        try:
            rate_per_s = float(value) if kind == "poisson" else math.nan
        except ValueError:
            rate_per_s = math.nan
        least, most = _RATES_PER_S
        if not least <= rate_per_s <= most:
            raise ConfigError(
                f"--arrivals: {text!r} is unknown; write full, poisson:RATE with a rate from "
                f"{least:g} to {most:g} requests per second, or trace"
            )
        return cls("poisson", rate_per_s)

    def __str__(self) -> str:
        """As it is written on the command line."""
        return f"poisson:{self.rate_per_s:g}" if self.kind == "poisson" else self.kind


class Stream(Protocol):
    """Requests that come, each given out once."""

    def due(self, now_s: float, waiting: int, inside: int = 0) -> list[Job]:
        """Those that have come since they were asked for last.

        Args:
            now_s: the time.
            waiting: requests that wait already.
            inside: requests that wait or run already.
        """
        ...

    def next_s(self) -> float:
        """When the next one comes if the system is empty; infinite: none will."""
        ...


class FullStream:
    """So many requests wait at any time.

    Args:
        lengths: endless.
        kept: how many.
    """

    def __init__(self, lengths: Iterator[tuple[int, int]], kept: int) -> None:
        self._lengths = enumerate(lengths)
        self._kept = kept

    def due(self, now_s: float, waiting: int, inside: int = 0) -> list[Job]:
        """See ``Stream.due``."""
        drawn = islice(self._lengths, max(0, self._kept - waiting))
        return [Job(number, *lengths, now_s) for number, lengths in drawn]

    def next_s(self) -> float:
        """See ``Stream.next_s``."""
        return 0.0


class ClosedStream:
    """So many requests wait or run at any time, as with clients that each wait for their answer.

    Args:
        lengths: endless.
        clients: how many.
    """

    def __init__(self, lengths: Iterator[tuple[int, int]], clients: int) -> None:
        self._lengths = enumerate(lengths)
        self._clients = clients

    def due(self, now_s: float, waiting: int, inside: int = 0) -> list[Job]:
        """See ``Stream.due``."""
        drawn = islice(self._lengths, max(0, self._clients - inside))
        return [Job(number, *lengths, now_s) for number, lengths in drawn]

    def next_s(self) -> float:
        """See ``Stream.next_s``."""
        return 0.0


class TimedStream:
    """Requests that come at their own times.

    Args:
        jobs: in order of arrival.
    """

    def __init__(self, jobs: Iterable[Job]) -> None:
        self._jobs = iter(jobs)
        self._next = next(self._jobs, None)

    def due(self, now_s: float, waiting: int, inside: int = 0) -> list[Job]:
        """See ``Stream.due``."""
        due = []
        while self._next is not None and self._next.arrival_s <= now_s:
            due.append(self._next)
            self._next = next(self._jobs, None)
        return due

    def next_s(self) -> float:
        """See ``Stream.next_s``."""
        return math.inf if self._next is None else self._next.arrival_s


def open_stream(arrivals: Arrivals, source: LengthSource, kept: int, seed: int) -> Stream:
    """A new stream; the same arguments make the same requests.

    Args:
        arrivals: when they come.
        source: of their lengths.
        kept: requests kept waiting, with full arrivals.
        seed: of lengths and of Poisson arrivals.

    Raises:
        ConfigError: a trace's own times are asked for, and there is no trace.
        InputError: its trace has no arrival times.
    """
    drawn = _draws(source, np.random.default_rng([seed, 0]))
    if arrivals.kind == "full":
        return FullStream(drawn, kept)
    if arrivals.kind == "poisson":
        times = _poisson(arrivals.rate_per_s, np.random.default_rng([seed, 1]))
        pairs = enumerate(zip(drawn, times, strict=False))
        return TimedStream(Job(number, *lengths, at_s) for number, (lengths, at_s) in pairs)
    if not isinstance(source, TraceLengths):
        raise ConfigError("--arrivals trace needs a --trace with arrival times, not --lengths")
    return TimedStream(
        Job(number, row.prompt_tokens, row.output_tokens, row.arrival_s or 0.0)
        for number, row in enumerate(source.trace.earliest())
    )


def _draws(source: LengthSource, rng: np.random.Generator) -> Iterator[tuple[int, int]]:
    while True:
        prompts, outputs = source.draw(rng, _BLOCK)
        yield from zip(prompts.tolist(), outputs.tolist(), strict=True)


def _poisson(rate_per_s: float, rng: np.random.Generator) -> Iterator[float]:
    at_s = 0.0
    while True:
        for gap_s in rng.exponential(1 / rate_per_s, _BLOCK).tolist():
            at_s += gap_s
            yield at_s
