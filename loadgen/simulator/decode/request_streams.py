"""Requests in order of arrival, in virtual time; the same ones for every policy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np

from loadgen.simulator.decode.length_sources import LengthSource, TraceLengths
from loadgen.traces.arrivals import Arrivals
from router.core.errors import ConfigError

_BLOCK = 1024


class Job(NamedTuple):
    """One request with its output length; numbers are unique."""

    number: int
    prompt_tokens: int
    output_tokens: int
    arrival_s: float
    priority: int = 0
    tenant: str = ""


class Stream(Protocol):
    """A stream of requests; it returns each request once."""

    def due(self, now_s: float, waiting: int, inside: int = 0) -> list[Job]:
        """Return the requests that have arrived since the last call.

        ``waiting`` requests wait already; ``inside`` wait or run.
        """

    def next_s(self) -> float:
        """Next arrival for an empty system; infinite: no more requests."""


class FullStream:
    """Stream that keeps a constant number of requests waiting."""

    def __init__(self, lengths: Iterator[tuple[int, int]], kept: int) -> None:
        self._lengths = enumerate(lengths)
        self._kept = kept

    def due(self, now_s: float, waiting: int, inside: int = 0) -> list[Job]:
        drawn = islice(self._lengths, max(0, self._kept - waiting))
        return [Job(number, *lengths, now_s) for number, lengths in drawn]

    def next_s(self) -> float:
        return 0.0


class ClosedStream(FullStream):
    """Stream that keeps a constant number of requests inside, like clients that await answers."""

    def due(self, now_s: float, waiting: int, inside: int = 0) -> list[Job]:
        return super().due(now_s, inside)


class TimedStream:
    """Stream of requests with their own arrival times."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        self._jobs = iter(jobs)
        self._next = next(self._jobs, None)

    def due(self, now_s: float, waiting: int, inside: int = 0) -> list[Job]:
        due = []
        while self._next is not None and self._next.arrival_s <= now_s:
            due.append(self._next)
            self._next = next(self._jobs, None)
        return due

    def next_s(self) -> float:
        return math.inf if self._next is None else self._next.arrival_s


def open_stream(arrivals: Arrivals, source: LengthSource, kept: int, seed: int) -> Stream:
    """Create a stream; the same arguments give the same requests.

    Raises:
        ConfigError: arrivals at a trace's own times, but no trace.
        InputError: the trace has no arrival times.
    """
    drawn = _draws(source, np.random.default_rng([seed, 0]))
    if arrivals.kind == "full":
        return FullStream(drawn, kept)
    if arrivals.kind == "poisson":
        times = _poisson(arrivals.value, np.random.default_rng([seed, 1]))
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
