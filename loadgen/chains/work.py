"""Requests by arrival, each with its amount of work: the same for every policy."""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Self

import numpy as np

from loadgen.chains.scenario import Scenario
from loadgen.traces.trace import Trace
from router.core.forecast.forecast import Floats


class Arrivals(Enum):
    """Law of arrivals: Poisson, or the gaps of a trace, scaled to the same rate."""

    POISSON = "poisson"
    TRACE = "trace"


class Service(Enum):
    """Law of a request's work: exponential, or by the lengths of a trace's requests."""

    EXPONENTIAL = "exponential"
    TRACE = "trace"


@dataclass(frozen=True, slots=True)
class Work:
    """Requests in the order of arrival."""

    arrival_s: Floats  # shape (R,), ascending
    size: Floats  # shape (R,), work relative to the mean; a factor of a chain's mean time


@dataclass(frozen=True, slots=True)
class Served:
    """Times of requests in the order of arrival, shape (R,): to the start, and from there on."""

    waiting_s: Floats
    service_s: Floats

    @property
    def response_s(self) -> Floats:
        return self.waiting_s + self.service_s

    def after(self, warmup: int) -> Self:
        """The times without those of the first requests."""
        return replace(self, waiting_s=self.waiting_s[warmup:], service_s=self.service_s[warmup:])


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """A trace's gaps and work, each with mean 1."""

    gaps: Floats  # shape (N,), from each request to the next, and from the last to the first
    sizes: Floats  # shape (N,), work of each request

    @classmethod
    def of(cls, trace: Trace, scenario: Scenario, *, timed: bool = True) -> Self:
        """Gaps and work of a trace in a scenario; where gaps are not needed, they are all equal.

        InputError without the arrival times that gaps need.
        """
        rows = trace.earliest() if timed else trace.requests
        sizes = np.array([scenario.request_s(row.prompt_tokens, row.output_tokens) for row in rows])
        gaps = np.ones(len(rows))
        if timed:
            spans = np.diff(np.array([row.arrival_s for row in rows]))
            mean_s = float(spans.mean()) if spans.any() else 1.0
            gaps = np.append(spans / mean_s, 1.0)  # the last gap is the mean
        return cls(gaps, sizes / sizes.mean())

    def drawn(self, rng: np.random.Generator, count: int) -> tuple[Floats, Floats]:
        """Consecutive rows from a random one on, cyclic."""
        rows = (int(rng.integers(len(self.gaps))) + np.arange(count)) % len(self.gaps)
        return self.gaps[rows], self.sizes[rows]


def draw_work(
    rate: float,
    count: int,
    seed: int,
    arrivals: Arrivals = Arrivals.POISSON,
    service: Service = Service.EXPONENTIAL,
    measured: Measured | None = None,
) -> Work:
    """Draw requests; at a higher rate the same seed gives the same ones, closer together.

    Laws of kind ``TRACE`` take ``measured`` values; if both do, gap and size stay paired.
    """
    gaps = np.random.default_rng([seed, 1]).exponential(size=count)
    size = np.random.default_rng([seed, 2]).exponential(size=count)
    if measured is not None:
        measured_gaps, measured_size = measured.drawn(np.random.default_rng([seed, 0]), count)
        gaps = measured_gaps if arrivals is Arrivals.TRACE else gaps
        size = measured_size if service is Service.TRACE else size
    return Work(np.cumsum(gaps) / rate, size)
