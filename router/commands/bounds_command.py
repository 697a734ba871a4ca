"""``evenstep bounds``: response times of jffc on workers of unequal speed."""

import math
from typing import Annotated

from rich.console import Console

from router.commands.json_output import STDOUT, finite, json_option, write_json
from router.commands.options import flag
from router.core.errors import ConfigError
from router.core.placement.bounds import response_bounds
from router.core.placement.exact_response import exact_response_s
from router.core.step_time import number_in

_MAX_SLOTS = 1_000_000
_LIMITS = (1e-9, 1e9)
_LONGEST = 100


def bounds(
    service_rates: Annotated[
        str, flag("requests per second that one slot of each chain completes", "R,…")
    ],
    slots: Annotated[str, flag("requests that each chain has at once", "N,…")],
    rate: Annotated[float, flag("requests per second that arrive", "R")],
    json_file: Annotated[str | None, json_option("write the result; - is stdout")] = None,
) -> None:
    """Mean response time of jffc, waiting included: bounds, and the exact value of small cases.

    For chains of servers, or any workers of unequal speed; with Poisson arrivals and exponential
    work (Theorem 3.7 of "Serving Chain-structured Jobs with Large Memory Footprints").
    """
    rates = [_rate("--service-rates", text) for text in service_rates.split(",")]
    counts = []
    for text in slots.split(","):
        if not (text.strip().isdecimal() and len(text) < _LONGEST and int(text) > 0):
            raise ConfigError(
                f"--slots takes whole numbers above 0, parted by commas, got {text:.99}"
            )
        counts.append(int(text))
    if len(rates) != len(counts):
        raise ConfigError(
            f"--service-rates names {len(rates)} chains and --slots {len(counts)}: one of each"
        )
    if sum(counts) > _MAX_SLOTS:
        raise ConfigError(f"--slots may add up to {_MAX_SLOTS:,} at most, got {sum(counts):,}")
    arrivals = _rate("--rate", str(rate))
    total = math.fsum(mu * count for mu, count in zip(rates, counts, strict=True))
    limits = response_bounds(rates, counts, arrivals)
    exact_s = exact_response_s(rates, counts, arrivals)
    stable = limits.lower_s < math.inf
    load = arrivals / total
    lines = [f"{arrivals:g} requests/s of {total:g} that can be served: load {load:.3g}"]
    if stable:
        exact = "not for so many slots and speeds" if exact_s is None else f"{exact_s:.6g} s"
        lines += [
            f"mean response time from {limits.lower_s:.6g} to {limits.upper_s:.6g} s",
            f"exact value: {exact}",
        ]
    else:
        lines.append("unstable: the queue grows without end")
    console = Console(stderr=json_file == STDOUT)
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    report = {
        "lower_s": finite(limits.lower_s),
        "exact_s": finite(exact_s),
        "upper_s": finite(limits.upper_s),
        "total_rate": total,
        "load": load,
        "stable": stable,
    }
    write_json(report, json_file)


def _rate(option: str, text: str) -> float:
    low, high = _LIMITS
    rate = number_in(text)
    if not low <= rate <= high:
        raise ConfigError(
            f"{option} takes requests per second from {low:g} to {high:g}, got {text}"
        )
    return rate
