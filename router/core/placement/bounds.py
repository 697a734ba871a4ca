"""Bounds on the mean response time under JFFC, in closed form.

Theorem 3.7 of "Serving Chain-structured Jobs with Large Memory Footprints", for Poisson arrivals
and exponential work. With n requests in the system, chains complete at most what the n fastest
slots do, and at least what the n slowest do. Either is a birth-death process.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from router.core.forecast.forecast import Floats, Ints
from router.core.placement.model import Chain


@dataclass(frozen=True, slots=True)
class ResponseBounds:
    """Bounds on the mean response time, waiting included; infinite under overload."""

    lower_s: float
    upper_s: float


def response_bounds(
    rates: Sequence[float] | Floats, slots: Sequence[int] | Ints, arrival_rate: float
) -> ResponseBounds:
    """Bounds by mu (a second and slot) and c of each chain, in any order, and lambda (a second).

    At lambda = 0 they are the limit towards it.
    """
    each = np.repeat(np.asarray(rates, dtype=float), np.asarray(slots, dtype=int))
    each.sort()
    return ResponseBounds(
        lower_s=_response_s(np.cumsum(each[::-1]), arrival_rate),
        upper_s=_response_s(np.cumsum(each), arrival_rate),
    )


def chain_bounds(chains: Sequence[Chain], arrival_rate: float) -> ResponseBounds:
    """As ``response_bounds``."""
    rates = [chain.service_rate for chain in chains]
    return response_bounds(rates, [chain.slots for chain in chains], arrival_rate)


def _response_s(death_rates: Floats, arrival_rate: float) -> float:
    """Mean response time of a birth-death process, equations (24) and (30) to (32).

    ``death_rates`` are nu(n) for n = 1 to C requests; the last one holds beyond, too.
    """
    if death_rates.size == 0 or arrival_rate >= death_rates[-1]:
        return math.inf
    if arrival_rate == 0:
        return 1 / float(death_rates[0])
    # phi_n / phi_0 spans thousands of orders of magnitude, so the largest is scaled to 1.
    log_phi = np.concatenate([[0.0], np.cumsum(np.log(arrival_rate) - np.log(death_rates))])
    phi = np.exp(log_phi - log_phi.max())
    full = death_rates.size
    load = arrival_rate / float(death_rates[-1])
    below = np.arange(full)
    weight = phi[:-1].sum() + phi[-1] / (1 - load)
    requests = below @ phi[:-1] + phi[-1] * (load / (1 - load) ** 2 + full / (1 - load))
    return float(requests / weight) / arrival_rate
