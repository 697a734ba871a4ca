"""Requests in the order of their arrival, and how much work each is: the same for every policy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from loadgen.chains.scenario import Scenario
from loadgen.traces.trace import Trace
from router.core.forecast.step_cost import Floats


class Arrivals(Enum):
    """When requests come: at random, or with the gaps of a trace, stretched to the same rate."""

    POISSON = "poisson"
    TRACE = "trace"


class Service(Enum):
    """How much work a request is: exponential, or by the lengths of a trace's requests."""

    EXPONENTIAL = "exponential"
    TRACE = "trace"


@dataclass(frozen=True, slots=True)
class Work:
    """Requests, the first to come first.

    Attributes:
        arrival_s: shape (R,), ascending.
        size: shape (R,), of each in means: a chain takes its mean service time times this.
    """

    arrival_s: Floats
    size: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """A trace's gaps and work, each with mean 1.

    Attributes:
        gaps: shape (N,), from each request to the next, and from the last to the first.
        sizes: shape (N,).
    """

    gaps: Floats
    sizes: Floats

    @classmethod
    def of(cls, trace: Trace, scenario: Scenario, *, timed: bool = True) -> Measured:
        """What a trace's requests are in a scenario.

        Args:
            trace: the requests.
            scenario: that says how long each would take.
            timed: whether their gaps are needed; if not, they are all alike.

        Raises:
            InputError: it has no arrival times, and they are needed.
        """
        rows = trace.earliest() if timed else trace.requests
        sizes = np.array([scenario.request_s(row.prompt_tokens, row.output_tokens) for row in rows])
        gaps = _gaps(np.array([row.arrival_s for row in rows])) if timed else np.ones(len(rows))
        return cls(gaps, sizes / sizes.mean())

    def drawn(self, rng: np.random.Generator, count: int) -> tuple[Floats, Floats]:
        """Gaps and sizes of that many in a row, from one drawn at random on and round."""
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
    """Requests; the same seed makes the same ones, only closer together at a higher rate.

    Args:
        rate: mean requests per second.
        count: how many.
        seed: of everything drawn.
        arrivals: the law of their gaps.
        service: the law of their sizes.
        measured: what the laws of a trace take; if both are, rows stay whole.
    """
    gaps = np.random.default_rng([seed, 1]).exponential(size=count)
    size = np.random.default_rng([seed, 2]).exponential(size=count)
    if measured is not None:
        measured_gaps, measured_size = measured.drawn(np.random.default_rng([seed, 0]), count)
        gaps = measured_gaps if arrivals is Arrivals.TRACE else gaps
        size = measured_size if service is Service.TRACE else size
    return Work(np.cumsum(gaps) / rate, size)


def _gaps(times_s: Floats) -> Floats:
    """From each time to the next, with mean 1; after the last it is that mean."""
    spans = np.diff(times_s)
    mean_s = float(spans.mean()) if spans.any() else 1.0
    return np.append(spans / mean_s, 1.0)
