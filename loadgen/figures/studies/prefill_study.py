"""What bfio makes of prompts that the decode workers compute, and what it loses unaware of them.

A computed prompt token costs as much time as beta KV tokens read. For a dense model of 8e9
parameters it takes 2 * 8e9 FLOP, which is 103 us at half of an A100's 312 TFLOP/s. Reading a KV
token takes 0.095 us (t_l of these studies, fitted to such a model on an A100), so beta is about
1,000. beta = 100 stands for prompts with nine tenths in the prefix cache.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from loadgen.figures.cases import Case
from loadgen.figures.samples import Claim, Outcomes, at_least
from loadgen.figures.study import COMPUTING, NONE, Study, config
from loadgen.figures.tables import IMBALANCE, THROUGHPUT, TPOT, TTFT, Table
from loadgen.simulator.decode.decode_config import DecodeConfig
from loadgen.simulator.decode.oracle import Knowledge
from router.core.forecast.forecast import WorkProfile

BETAS = (100.0, 1000.0)
CHUNK = 512
SEEDS = 3
SERVED = "bfio, serve's defaults"
UNAWARE = f"{NONE}, unaware of prompts"
# Throughput of serve's defaults over that of fcfs.
GAINS: Mapping[float, float] = MappingProxyType({100.0: 1.2, 1000.0: 1.4})
_STEPS = 2000


def _ways(beta: float) -> dict[str, DecodeConfig]:
    profile = WorkProfile(prefill_beta=beta, prefill_chunk=CHUNK)
    common: dict[str, Any] = {"steps": _STEPS, "profile": profile}
    runs = {"fcfs": config("burstgpt", "fcfs", **common)}
    defaults = {"knowledge": Knowledge("auto"), "overcommit": None, "deadline_steps": None}
    runs[SERVED] = config("burstgpt", NONE, **common, **defaults)
    runs[NONE] = config("burstgpt", NONE, **common)
    runs[UNAWARE] = replace(runs[NONE], known_profile=WorkProfile())
    return runs


class PrefillStudy(Study):
    title = "Prefill on the decode workers"
    conditions = (
        f"BurstGPT lengths, G=16, B=72, pool 128, {_STEPS:,} steps without the first 500. A prompt "
        f"token costs beta KV tokens' worth, in chunks of {CHUNK} per request and step; beta = "
        "1,000: 2 x 8e9 FLOP at half of 312 TFLOP/s against 9.5e-8 s per KV token read (a dense 8B "
        "model on an A100); beta = 100: nine tenths of the prompts in the prefix cache. bfio "
        "learns the cost from the steps, unless unaware; serve's defaults: with survival curve, "
        f"starvation after 5 s, over-commit as measured. {SEEDS} seeds. Imbalance: KV tokens alone."
    )
    physics = COMPUTING

    def cases(self) -> Iterator[Case]:
        for beta in BETAS:
            for way, run in _ways(beta).items():
                yield Case((f"{beta:g}", way), run, seeds=SEEDS)

    def tables(self, outcomes: Outcomes) -> list[Table]:
        columns = (THROUGHPUT, TPOT, TTFT, IMBALANCE)
        rows = []
        for beta in BETAS:
            first = outcomes[f"{beta:g}", "fcfs"]
            for way in _ways(beta):
                sample = outcomes[f"{beta:g}", way]
                over = sample.ratio(first, THROUGHPUT.metric) - 1
                cells = [column.cell(sample) for column in columns]
                rows.append([f"beta {beta:g}, {way}", *cells, f"{over:+.1%}"])
        return [Table(["", *(column.title for column in columns), "throughput over fcfs"], rows)]

    def claims(self, outcomes: Outcomes) -> Iterator[Claim]:
        for beta, gain in GAINS.items():
            ours, fcfs = outcomes[f"{beta:g}", SERVED], outcomes[f"{beta:g}", "fcfs"]
            ratio = ours.ratio(fcfs, THROUGHPUT.metric)
            yield at_least(f"beta {beta:g}, {SERVED}: throughput over fcfs", ratio, gain)
