"""The live router on emulated workers against the simulator, on the same requests.

    python tests/bench/bench_live.py [--seeds 5] [--requests 5000] [--time-scale 2] [--json FILE]

8 workers of 32 slots, 320 requests in the system, real HTTP. The dispatch delay of a live run is
measured: slot time that stands empty, per request. The simulator knows whole steps only, so its
imbalance at that delay is interpolated between the two runs beside it.
"""

import argparse
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from loadgen.demo.demo_command import CAP_TOKENS
from loadgen.demo.figures import steady_steps, step_figures
from loadgen.demo.run import STARVATION_S, Fleet, RunPlan, execute
from loadgen.emulator.emulator_settings import EmulatorSettings
from loadgen.report.origin import EMULATION, SERVING, Engines, origin
from loadgen.simulator.decode.barrier_decode import simulate
from loadgen.simulator.decode.decode_config import DecodeConfig
from loadgen.simulator.decode.length_sources import TraceLengths
from loadgen.simulator.decode.oracle import Knowledge
from loadgen.simulator.decode.request_streams import FullStream
from loadgen.traces.trace import TraceRequest, load_trace
from router.core.types import Dispatch
from tests.support.figure_files import write_figures

CODE = (
    *SERVING,
    *EMULATION,
    "loadgen/replay",
    "loadgen/simulator/decode",
    "tests/bench/bench_live.py",
)

FLEET = Fleet()
RUN_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Row:
    """One seed: a live run, and the simulator's at its delay."""

    seed: int
    steps: int
    delay_steps: float
    live_tokens: float
    simulated_tokens: float
    simulated_at_0_tokens: float
    lateness_p99: float

    @property
    def ratio(self) -> float:
        return self.live_tokens / self.simulated_tokens


def lengths(rows: Sequence[TraceRequest]) -> Iterator[tuple[int, int]]:
    return ((row.prompt_tokens, min(row.output_tokens, CAP_TOKENS)) for row in rows)


def simulated(
    rows: Sequence[TraceRequest], seed: int, delay: int, window: range, step_s: float
) -> float:
    """Mean imbalance over the window's steps, of the same requests in the same order."""
    config = DecodeConfig(
        policy="bfio",
        lengths=TraceLengths.of(load_trace()),
        workers=FLEET.workers,
        slots=FLEET.slots,
        pool=FLEET.pool,
        steps=window.stop,
        warmup=window.start,
        seed=seed,
        dispatch_delay=delay,
        deadline_steps=round(STARVATION_S / step_s),
        overcommit=0,
        knowledge=Knowledge("none"),
    )
    endless = [*rows, *rows]  # the simulator may need a few more to the end of the window
    result = simulate(config, stream=FullStream(lengths(endless), FLEET.pool))
    return float(result.report()["avg_imbalance_tokens"])  # type: ignore[arg-type]


def one_seed(seed: int, requests: int, time_scale: float) -> Row:
    plan = RunPlan("bfio", Dispatch.POOL, requests, CAP_TOKENS, seed, time_scale)
    with tempfile.TemporaryDirectory() as folder:
        outcome = execute(plan, FLEET, Path(folder), RUN_TIMEOUT_S)
    steps = steady_steps(outcome)
    figures = step_figures(steps, FLEET)
    assert figures is not None
    rows = load_trace().sample(requests, seed)
    mean_output = fmean(output for _, output in lengths(rows))
    # A request runs for as many steps as it has tokens; the rest of the slots' time is bubbles.
    delay = (1 / figures.slots_used - 1) * mean_output
    window = range(steps[0].step, steps[-1].step)
    low = math.floor(delay)
    around = [simulated(rows, seed, d, window, figures.step_mean_s) for d in (low, low + 1)]
    share = delay - low
    return Row(
        seed,
        len(steps),
        delay,
        figures.imbalance_tokens,
        around[0] * (1 - share) + around[1] * share,
        simulated(rows, seed, 0, window, figures.step_mean_s),
        figures.lateness_p99,
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--requests", type=int, default=5000)
    options.add_argument("--time-scale", type=float, default=2.0)
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    rows = []
    print("| seed | steps | delay | live | simulated | at delay 0 | ratio | lateness p99 |")
    print("|---|---|---|---|---|---|---|---|")
    for seed in range(given.seeds):
        rows.append(row := one_seed(seed, given.requests, given.time_scale))
        print(
            f"| {seed} | {row.steps} | {row.delay_steps:.2f} | {row.live_tokens:,.0f} | "
            f"{row.simulated_tokens:,.0f} | {row.simulated_at_0_tokens:,.0f} | {row.ratio:.2f} | "
            f"{row.lateness_p99:.1%} |",
            flush=True,
        )
    live, model = fmean(r.live_tokens for r in rows), fmean(r.simulated_tokens for r in rows)
    print(
        f"\nmean of {len(rows)} seeds: live {live:,.0f}, simulated {model:,.0f}: {live / model:.2f}"
    )
    if given.json:
        result = {
            "live_tokens": live,
            "simulated_tokens": model,
            "rows": [vars(row) for row in rows],
        }
        write_figures(
            given.json, result, origin(Engines.EMULATED, CODE, EmulatorSettings().described())
        )


if __name__ == "__main__":
    main()
