"""Cost of ignoring prefill where the decode workers prefill as well.

A computed prompt token costs as much time as beta KV tokens read. For a dense model of 8e9
parameters it takes 2 * 8e9 FLOP, which is 103 us at half of an A100's 312 TFLOP/s. Reading a KV
token takes 0.095 us (t_l of these studies, fitted to such a model on an A100), so beta is about
1,000. beta = 100 stands for prompts with nine tenths in the prefix cache.
"""

from __future__ import annotations

from dataclasses import replace

from loadgen.figures.cases import Case
from loadgen.figures.laboratory import Laboratory
from loadgen.figures.samples import Outcomes
from loadgen.figures.study import COMPUTING, NONE, ORACLE, Study, config
from loadgen.figures.tables import IMBALANCE, THROUGHPUT, TPOT, TTFT, Table
from router.core.forecast.forecast import WorkProfile

BETAS = (100.0, 1000.0)
CHUNK = 512
_WAYS = ("fcfs", "least_tokens", NONE, ORACLE)
UNAWARE = f"{NONE}, ignoring prefill"
_STEPS = 2000


class PrefillStudy(Study):
    title = "Prefill on the decode workers"
    conditions = (
        f"BurstGPT lengths, G=16, B=72, pool 128, {_STEPS:,} steps without the first 500. A prompt "
        f"token costs beta KV tokens' worth, in chunks of {CHUNK} per request and step; beta = "
        "1,000: 2 x 8e9 FLOP at half of 312 TFLOP/s against 9.5e-8 s per KV token read (a dense 8B "
        "model on an A100); beta = 100: nine tenths of the prompts in the prefix cache. Imbalance: "
        "KV tokens alone."
    )
    physics = COMPUTING

    def measure(self, laboratory: Laboratory) -> Outcomes:
        cases = []
        for beta in BETAS:
            changes = {"profile": WorkProfile(prefill_beta=beta, prefill_chunk=CHUNK)}
            runs = {way: config("burstgpt", way, steps=_STEPS, **changes) for way in _WAYS}
            runs[UNAWARE] = replace(runs[NONE], known_profile=WorkProfile())
            cases += [Case((f"{beta:g}", way), run) for way, run in runs.items()]
        return laboratory.run(cases)

    def tables(self, outcomes: Outcomes) -> list[Table]:
        columns = (THROUGHPUT, TPOT, TTFT, IMBALANCE)
        rows = []
        for beta in BETAS:
            first = outcomes[f"{beta:g}", "fcfs"]
            for way in (*_WAYS, UNAWARE):
                sample = outcomes[f"{beta:g}", way]
                over = sample.ratio(first, THROUGHPUT.metric) - 1
                cells = [column.cell(sample) for column in columns]
                rows.append([f"beta {beta:g}, {way}", *cells, f"{over:+.1%}"])
        return [Table(["", *(column.title for column in columns), "throughput over fcfs"], rows)]
