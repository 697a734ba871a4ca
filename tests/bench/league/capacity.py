"""Requests per engine second that the league's ranks serve without prompt budgets, by simulation.

    python -m tests.bench.league.capacity

Azure's conversation lengths with the league's cut of outputs, 2,500 at 300/s, the simulator's own
engines, evenstep's policy and no prompt budgets; tokens per second after the first fifth over
tokens per request. With budgets, which evenstep sets by default, the ranks serve more.
"""

from dataclasses import replace
from statistics import fmean

from loadgen.simulator.serving.serving_config import ServingConfig
from loadgen.simulator.serving.serving_simulation import simulate_serving
from loadgen.traces.arrivals import Arrivals
from loadgen.traces.trace import Trace, load_trace
from router.core.step_time import StepTime
from tests.bench.league.workloads import CAP_TOKENS


def capacity(*, barrier: bool, requests: int = 2500) -> float:
    """Of 8 ranks of 64 slots."""
    rows = load_trace("azure-conv").sample(requests, 0)
    cut = tuple(replace(row, output_tokens=min(row.output_tokens, CAP_TOKENS)) for row in rows)
    config = ServingConfig(
        policy="bfio",
        trace=Trace("azure-conv, cut", "planned", cut),
        arrivals=Arrivals("poisson", 300.0),
        requests=requests,
        workers=8,
        slots=64,
        barrier=barrier,
        kv_tokens=400_000,
        block_tokens=16,
        batch_tokens=2048,
        step_time=StepTime(5e-3, 9.5e-8, per_prompt_token_s=5e-5),
        warmup=0.2,
    )
    return simulate_serving(config).throughput_tok_s / fmean(row.output_tokens for row in cut)


if __name__ == "__main__":
    for barrier in (True, False):
        print(
            f"{'behind a barrier' if barrier else 'each alone'}: {capacity(barrier=barrier):.1f}/s"
        )
