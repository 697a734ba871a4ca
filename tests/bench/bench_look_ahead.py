"""Knowing more never hurts: imbalance with an oracle's look-ahead beside none, by trace.

    python tests/bench/bench_look_ahead.py [TRACE...] [--workers 16] [--steps 4500] [--json FILE]

Always full, 72 slots, pool 128 (4 G above 32 workers), the first 500 steps left out, paired seeds;
parameters by the rule. TRACE: a bundled trace or a file; without any, all bundled ones.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from loadgen.report.origin import Engines, origin
from loadgen.simulator.decode.barrier_decode import simulate
from loadgen.simulator.decode.decode_config import DecodeConfig
from loadgen.simulator.decode.length_sources import TraceLengths
from loadgen.simulator.decode.oracle import Knowledge
from loadgen.traces.trace import BUNDLED, load_trace
from tests.support.figure_files import write_figures
from tests.support.paper import PAPER

CODE = (
    "router/core/policies/bfio",
    "router/core/forecast",
    "loadgen/simulator/decode",
    "tests/bench/bench_look_ahead.py",
)
SLOTS = 72
WARMUP = 500
Row = dict[str, Any]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("traces", nargs="*", default=list(BUNDLED))
    options.add_argument("--workers", type=int, nargs="*", default=[16])
    options.add_argument("--steps", type=int, default=4500)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    header = origin(Engines.SIMULATED, CODE)
    rows: list[Row] = []
    for trace in given.traces:
        for workers in given.workers:
            rows.append(row(trace, workers, given.steps, range(given.seeds)))
            sys.stdout.write(f"{rows[-1]}\n")
            sys.stdout.flush()
            if given.json:
                write_figures(given.json, {"runs": rows}, header)


def row(name: str, workers: int, steps: int, seeds: Sequence[int]) -> Row:
    """One trace and number of workers."""
    lengths = TraceLengths.of(load_trace(name))

    def runs(lookahead: str) -> list[Mapping[str, float]]:
        changes = {**PAPER, "knowledge": Knowledge.parse(lookahead)}
        results = [
            simulate(
                DecodeConfig(
                    policy="bfio",
                    lengths=lengths,
                    workers=workers,
                    slots=SLOTS,
                    pool=128 if workers <= 32 else 4 * workers,
                    steps=steps,
                    warmup=WARMUP,
                    seed=seed,
                    **changes,
                )
            )
            for seed in seeds
        ]
        return [
            {"imbalance": one.avg_imbalance_tokens, "tok_s": one.throughput_tok_s}
            for one in results
        ]

    without, oracle = runs("none"), runs("oracle")
    ratios = [a["imbalance"] / b["imbalance"] for a, b in zip(oracle, without, strict=True)]
    means = {
        f"{kind}_{key}": round(fmean(one[key] for one in each), 1)
        for kind, each in (("none", without), ("oracle", oracle))
        for key in ("imbalance", "tok_s")
    }
    return {
        "trace": Path(name).name.partition(".")[0],
        "prompt_tokens": round(fmean(lengths.prompts.tolist()), 1),
        "output_tokens": round(fmean(lengths.outputs.tolist()), 1),
        "workers": workers,
        "steps": steps,
        "seeds": len(seeds),
        **means,
        "ratio": round(means["oracle_imbalance"] / means["none_imbalance"], 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


if __name__ == "__main__":
    main()
