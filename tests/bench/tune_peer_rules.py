"""Weights of other routers' rules, tuned on another trace than the one that they are compared on.

    python tests/bench/tune_peer_rules.py [--requests 2500] [--seeds 2]

The trace: conversations of five turns in the mean, whose messages and answers have the lengths of
Azure's conversation trace, behind a system prompt of 1,024 tokens. For each cost of a prompt token
the weights with the least geometric mean of mean TTFT and mean TPOT win. The study ``serving`` of
``evenstep figures`` has them as constants.
"""

import argparse
import random
from itertools import count, product
from math import sqrt
from statistics import fmean

from loadgen.simulator.serving.serving_config import ServingConfig
from loadgen.simulator.serving.serving_simulation import simulate_serving
from loadgen.traces.arrivals import Arrivals
from loadgen.traces.trace import Trace, load_trace
from loadgen.traces.trace_files import BLOCK_TOKENS, TraceRequest
from router.core.policies.baselines import Choose, PerRequest
from router.core.policies.prompts import kv_cost, prefix_score
from router.core.step_time import StepTime
from router.core.types import Dispatch

SYSTEM_BLOCKS = 2
LONGEST_TOKENS = 100_000
# Seconds per prompt token, and a rate at which ranks are about as busy as in the comparison.
REGIMES = ((5e-5, 11.0), (5e-6, 30.0))


def conversations(requests: int, seed: int = 0) -> Trace:
    """Turns of several conversations at a time, one after the other drawn at random."""
    rng = random.Random(seed)
    lengths = iter(load_trace("azure-conv").requests * 3)
    serial = count(1)
    open_: list[tuple[int, int]] = []  # number, tokens so far
    rows: list[TraceRequest] = []
    while len(rows) < requests:
        while len(open_) < 100:
            open_.append((next(serial), SYSTEM_BLOCKS * BLOCK_TOKENS))
        at = rng.randrange(len(open_))
        number, tokens = open_[at]
        drawn = next(lengths)
        prompt = tokens + drawn.prompt_tokens
        own = range(SYSTEM_BLOCKS, -(-prompt // BLOCK_TOKENS))
        ids = (*range(SYSTEM_BLOCKS), *((number << 20) + block for block in own))
        rows.append(TraceRequest(prompt, drawn.output_tokens, None, ids))
        open_[at] = number, prompt + drawn.output_tokens
        if rng.random() < 0.2 or prompt > LONGEST_TOKENS:
            del open_[at]
    return Trace("conversations", "made", tuple(rows))


def cost(trace: Trace, choose: Choose, prompt_token_s: float, rate: float, seed: int) -> float:
    result = simulate_serving(
        ServingConfig(
            policy="kv_cost",
            trace=trace,
            arrivals=Arrivals("poisson", rate),
            requests=len(trace.requests),
            step_time=StepTime(5e-3, 9.5e-8, per_prompt_token_s=prompt_token_s),
            dispatch=Dispatch.INSTANT,
            seed=seed,
        ),
        policy=PerRequest(choose),
    )
    assert result.tpot_mean_s is not None
    return sqrt(result.ttft_mean_s * result.tpot_mean_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=2500)
    parser.add_argument("--seeds", type=int, default=2)
    given = parser.parse_args()
    trace = conversations(given.requests)
    weights = [2.0**power for power in range(7)]
    triples = list(product((1.0, 3.0, 10.0), (0.5, 2.0, 8.0), (2.0,)))
    for prompt_token_s, rate in REGIMES:
        rules: dict[str, Choose] = {f"kv_cost({weight:g})": kv_cost(weight) for weight in weights}
        rules |= {f"prefix_score{triple}": prefix_score(0, *triple) for triple in triples}
        found = {
            name: fmean(
                cost(trace, choose, prompt_token_s, rate, seed) for seed in range(given.seeds)
            )
            for name, choose in rules.items()
        }
        for name, value in sorted(found.items(), key=lambda pair: pair[1]):
            print(f"t_p {prompt_token_s:g}, {rate:g}/s: {name}: {1e3 * value:.1f} ms", flush=True)


if __name__ == "__main__":
    main()
