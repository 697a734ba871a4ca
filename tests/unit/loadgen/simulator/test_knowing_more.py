"""Knowing more never hurts: the look-ahead of an oracle beside none, by the rule's parameters."""

from statistics import fmean

import pytest

from loadgen.simulator.decode.barrier_decode import simulate
from loadgen.simulator.decode.decode_config import DecodeConfig
from loadgen.simulator.decode.length_sources import TraceLengths
from loadgen.simulator.decode.oracle import Knowledge
from loadgen.traces.trace import BUNDLED, load_trace
from tests.support.paper import PAPER

SEEDS = (0, 1)
NO_WORSE = 1.1


@pytest.mark.parametrize("trace", BUNDLED)
def test_an_oracle_balances_no_worse_than_none(trace: str) -> None:
    lengths = TraceLengths.of(load_trace(trace))

    def imbalance_tokens(lookahead: str) -> float:
        changes = {**PAPER, "knowledge": Knowledge.parse(lookahead)}
        runs = [
            DecodeConfig(
                policy="bfio", lengths=lengths, steps=1000, warmup=200, seed=seed, **changes
            )
            for seed in SEEDS
        ]
        return fmean(simulate(run).avg_imbalance_tokens for run in runs)

    assert imbalance_tokens("oracle") <= NO_WORSE * imbalance_tokens("none")
