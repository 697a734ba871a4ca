"""What the plug-in costs vLLM's own schedulers; a task of ``real_schedulers``."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from tests.support.real_schedulers import Driver, Reader, Schedulers

RUNS = 5
KEPT = {"1": (0, 0), "2": (1, 1), "1 to 4": (0, 3)}
"""Fewest and most drafts that a request keeps, by the tokens that it gains in a step."""


def bench(
    make: Schedulers, ours: str, theirs: str, running: int, steps: int, kept: tuple[int, int]
) -> dict[str, float]:
    """CPU time of the engine's thread in one step, hook on and off alternating; bytes of a step.

    CPU time, because a thread that loses its core to somebody else is not the hook's fault; the
    hook's wall time is given beside it. Of several runs each figure's least is given: what else the
    machine does only adds.
    """
    ahead = int("Async" in ours)
    rng = random.Random(running)
    drivers = [
        Driver(
            make.make(flavour, slots=running, drafts=kept[1], step_tokens=max(8192, 8 * running)),
            ahead,
            kept=lambda: rng.randint(*kept),
        )
        for flavour in (ours, theirs)
    ]
    reporter = drivers[0].scheduler.evenstep
    meter = Meter()
    for name in ("scheduled", "stepped", "arrived"):
        setattr(reporter, name, meter.around(getattr(reporter, name)))
    reader = Reader(reporter.endpoint)
    warm = max(2, steps // 5)  # two are the fewest that have quantiles
    bench_run(drivers, meter, reader, running, range(warm))
    reader.bytes = reader.growths = 0
    firsts = range(warm, warm + RUNS * steps, steps)
    runs = [
        bench_run(drivers, meter, reader, running, range(first, first + steps)) for first in firsts
    ]
    assert not reporter.failed
    reader.close()
    for driver in drivers:
        driver.scheduler.shutdown()
    least = {name: min(run[name] for run in runs) for name in runs[0]}
    per_step = {"bytes": reader.bytes, "growths": reader.growths}
    return {**least, **{name: total / (RUNS * steps) for name, total in per_step.items()}}


def bench_run(
    drivers: list[Driver], meter: Meter, reader: Reader, running: int, numbers: range
) -> dict[str, float]:
    """Medians over some steps; the first driver has the hook."""
    took: tuple[list[float], list[float]] = ([], [])
    hooked: list[tuple[float, float]] = []
    for number in numbers:
        for which in (0, 1) if number % 2 else (1, 0):
            meter.clear()
            refill(drivers[which], running, number)
            began_s = time.thread_time()
            drivers[which].step()
            took[which].append(time.thread_time() - began_s)
            if which == 0:
                hooked.append((meter.cpu_s, meter.wall_s))
        reader.until(drivers[0].scheduler.evenstep._publisher.sequence)
    cpu_s, wall_s = zip(*hooked, strict=True)
    return {
        "hook_us": statistics.median(cpu_s) * 1e6,
        "hook_p90_us": statistics.quantiles(cpu_s, n=10)[-1] * 1e6,
        "hook_wall_us": statistics.median(wall_s) * 1e6,
        "step_us": statistics.median(took[0]) * 1e6,
        "step_without_us": statistics.median(took[1]) * 1e6,
        "loop_ms": loop_s() * 1e3,
    }


def loop_s() -> float:
    """CPU time of a million additions, which tells how fast the machine is at the moment."""
    began_s, total = time.thread_time(), 0
    for number in range(1_000_000):
        total += number
    return time.thread_time() - began_s


class Meter:
    """Seconds spent in some methods."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.cpu_s = self.wall_s = 0.0

    def around(self, method: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            wall_s, cpu_s = time.perf_counter(), time.thread_time()
            method(*arguments)
            self.cpu_s += time.thread_time() - cpu_s
            self.wall_s += time.perf_counter() - wall_s

        return run


def refill(driver: Driver, running: int, number: int) -> None:
    """Requests that keep every slot busy, 200 tokens each on average."""
    rng = random.Random(number)
    have = sum(driver.scheduler.get_request_counts())
    first = not number
    for _ in range(running + 4 - have):
        left = rng.randrange(1, 400) if first else rng.randrange(100, 301)
        driver.submit([9] * rng.randrange(16, 128), left)
