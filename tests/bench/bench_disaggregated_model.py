"""The simulator beside what bench_disaggregated.py measured: the imbalance of the decode workers.

    python tests/bench/bench_disaggregated_model.py LIVE.json [--json FILE]

The simulator gets the same requests in the same order, the same times of steps, prompts and
transfers, and the over-commit that the router chose at last. Imbalance is G max L - sum L, averaged
over the same steps, in which all slots are wanted. A live run's dispatch delay is the slot time
that stands empty per request. The simulator knows whole steps only: its imbalance at that delay is
interpolated; below its least delay, that one counts. `at 0` has no delay but the transfer. --json
takes a part for each trace, live runs and model: tests/data/handoff/live.json.
"""

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from docs.kept_figures import read_figures
from loadgen.demo.run import STARVATION_S
from loadgen.emulator.emulator_settings import EmulatorSettings
from loadgen.engine.prefill_settings import PrefillSettings, parse_prefill_time
from loadgen.report.origin import Engines, origin
from loadgen.simulator.decode.barrier_decode import simulate
from loadgen.simulator.decode.decode_config import DecodeConfig
from loadgen.simulator.decode.length_sources import TraceLengths
from loadgen.simulator.decode.oracle import Knowledge
from loadgen.simulator.decode.prefill_workers import PrefillConfig
from loadgen.simulator.decode.request_streams import FullStream
from loadgen.traces.trace import Trace, load_trace
from router.core.step_time import StepTime
from router.core.types import Dispatch
from tests.bench.bench_disaggregated import (
    CAP_TOKENS,
    DECODES,
    POOL,
    PREFILL_CHUNK,
    PREFILL_STEP_TIME,
    PREFILLS,
    SLOTS,
    STEP_TIME,
)
from tests.bench.bench_disaggregated import CODE as LIVE
from tests.support.figure_files import write_part

PHYSICS = EmulatorSettings(prefill=PrefillSettings()).described()
CODE = (*LIVE, "loadgen/simulator/decode", "tests/bench/bench_disaggregated_model.py")

MOST_DELAY_STEPS = 8
KV_TOKENS = 400_000  # of an emulated worker that is not told
ALLOWED = 0.25


@dataclass(frozen=True, slots=True)
class Row:
    """A live run beside the simulator's; imbalances in tokens, delays in steps."""

    trace: str
    name: str
    seed: int
    live: float
    simulated: float
    simulated_at_0: float
    live_delay: float
    simulated_delays: tuple[float, ...]
    overcommit: int
    lateness_p99: float

    @property
    def ratio(self) -> float:
        """Live over simulated."""
        return self.live / self.simulated


def capped(trace: Trace) -> Trace:
    """The trace with outputs cut at ``CAP_TOKENS``."""
    requests = (
        replace(each, output_tokens=min(each.output_tokens, CAP_TOKENS)) for each in trace.requests
    )
    return replace(trace, requests=tuple(requests))


def compare(run: dict[str, Any]) -> Row:
    """Simulate what was run live."""
    trace, steady = capped(load_trace(run["trace"])), run["steady"]
    requests = [
        (each.prompt_tokens, each.output_tokens)
        for each in trace.sample(run["requests"], run["seed"])
    ]
    mean_output = fmean(output for _, output in requests)
    delay = delay_steps(steady["slots_used"], mean_output)
    found = list(around(config_of(run, trace), requests, delay, mean_output))
    (low, before), (high, after) = found[-2:] if len(found) > 1 else (found[0], found[0])
    share = min(1.0, (delay - low) / (high - low)) if high > low else 0.0
    return Row(
        trace=run["trace"],
        name=run["name"],
        seed=run["seed"],
        live=steady["imbalance_tokens"],
        simulated=before + share * (after - before),
        simulated_at_0=found[0][1],
        live_delay=delay,
        simulated_delays=tuple(delay for delay, _ in found),
        overcommit=int(run["overcommit"]),
        lateness_p99=steady["lateness_p99"],
    )


def config_of(run: dict[str, Any], trace: Trace) -> DecodeConfig:
    """The settings of a live run, without a dispatch delay."""
    steady, dispatch = run["steady"], Dispatch(run["dispatch"])
    pool = dispatch is Dispatch.POOL
    prefill_time = parse_prefill_time(PREFILL_STEP_TIME)
    return DecodeConfig(
        policy=run["policy"],
        dispatch=dispatch,
        lengths=TraceLengths.of(trace),
        workers=DECODES,
        slots=SLOTS,
        pool=PREFILLS * SLOTS + POOL,
        steps=steady["stop"],
        warmup=steady["first"],
        seed=run["seed"],
        overcommit=int(run["overcommit"]) if pool else 0,
        deadline_steps=round(STARVATION_S / steady["step_mean_s"]) if pool else 0,
        knowledge=Knowledge.parse("survival"),
        step_time=StepTime.parse(STEP_TIME),
        prefill=PrefillConfig(PREFILLS, prefill_time, int(PREFILL_CHUNK), KV_TOKENS),
    )


def delay_steps(slots_used: float, mean_output: float) -> float:
    """Empty slot time per request; a request of n tokens runs n steps."""
    return (1 / slots_used - 1) * mean_output


def around(
    config: DecodeConfig, requests: list[tuple[int, int]], delay: float, mean_output: float
) -> Iterator[tuple[float, float]]:
    """Delays and imbalances, up to the live run's delay."""
    for steps in range(MOST_DELAY_STEPS):
        # A few more may be needed to the end of the window.
        stream = FullStream(iter([*requests, *requests]), config.pool)
        result = simulate(replace(config, dispatch_delay=steps), stream=stream, keep_records=True)
        assert result.records is not None
        used = result.records.tokens.mean() / (config.workers * config.slots)
        found = delay_steps(float(used), mean_output)
        yield found, result.avg_imbalance_tokens
        if found >= delay:
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("live", type=Path, help="what bench_disaggregated.py --json wrote")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    runs = [run for run in read_figures(given.live)["rows"] if run["split"] and run["steady"]]
    print("| trace, run, seed | live | simulated | ratio | at 0 | delay | over-commit | lateness |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    rows = []
    for run in runs:
        rows.append(row := compare(run))
        print(
            f"| {row.trace}, {row.name}, {row.seed} | {row.live:,.0f} | {row.simulated:,.0f} | "
            f"{row.ratio:.2f} | {row.simulated_at_0:,.0f} | {row.live_delay:.2f} | "
            f"{row.overcommit} | {row.lateness_p99:.1%} |",
            flush=True,
        )
    means = [summary(rows, *key) for key in dict.fromkeys((row.trace, row.name) for row in rows)]
    for mean in means:
        print(f"{mean['trace']}, {mean['name']}: live / simulated {mean['ratio']:.2f}")
    if given.json:
        for trace in dict.fromkeys(run["trace"] for run in runs):
            model = {
                "means": [mean for mean in means if mean["trace"] == trace],
                "rows": [asdict(r) | {"ratio": r.ratio} for r in rows if r.trace == trace],
            }
            part = {"model": model, "live": [run for run in runs if run["trace"] == trace]}
            write_part(given.json, trace, part, origin(Engines.EMULATED, CODE, PHYSICS))


def summary(rows: list[Row], trace: str, name: str) -> dict[str, Any]:
    """Means over the seeds."""
    mine = [row for row in rows if (row.trace, row.name) == (trace, name)]
    live, simulated = fmean(row.live for row in mine), fmean(row.simulated for row in mine)
    return {
        "trace": trace,
        "name": name,
        "seeds": len(mine),
        "live_tokens": live,
        "simulated_tokens": simulated,
        "ratio": live / simulated,
        "within": abs(live / simulated - 1) <= ALLOWED,
    }


if __name__ == "__main__":
    main()
