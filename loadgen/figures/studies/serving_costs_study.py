"""From prompts that cost next to nothing to prompts that cost all: which rule pays where."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from loadgen.figures.fingerprints import SERVING_FOLDERS
from loadgen.figures.laboratory import Laboratory
from loadgen.figures.samples import Outcomes
from loadgen.figures.serving_cases import ServingCase
from loadgen.figures.studies.serving_study import (
    ALL_TOKENS,
    COLUMNS,
    JOINT,
    OURS,
    REGIMES,
    beside,
)
from loadgen.figures.study import SERVING, Study
from loadgen.figures.tables import Table
from router.core.types import Dispatch

_TOKEN_S = 9.5e-8
# By t_p / t_l, requests per second. A request's prompt, without what is cached, has some 9,000
# tokens; its 186 steps read 13,000. At these rates both take 60 % of eight ranks' time.
RATES: Mapping[int, str] = MappingProxyType({10: "20", 100: "15", 1000: "4.4", 10_000: "0.55"})
_WAYS = (JOINT, OURS, "least_tokens")


class ServingCostsStudy(Study):
    title = "What a prompt token costs, and which rule pays"
    conditions = (
        "As in the studies above, with t_l = 9.5e-8 s, another t_p, and a rate at which prompts "
        "and outputs together take some 60 % of the ranks' time."
    )
    code = SERVING_FOLDERS
    physics = SERVING

    def measure(self, laboratory: Laboratory) -> Outcomes:
        return laboratory.run(
            [
                ServingCase(
                    (str(ratio), way),
                    replace(
                        REGIMES[ALL_TOKENS],
                        policy=way,
                        arrivals=f"poisson:{rate}",
                        step_time=f"5e-3,{_TOKEN_S:g},0,{ratio * _TOKEN_S:g}",
                        dispatch=Dispatch.POOL if way == JOINT else Dispatch.INSTANT,
                    ),
                )
                for ratio, rate in RATES.items()
                for way in _WAYS
            ]
        )

    def tables(self, outcomes: Outcomes) -> list[Table]:
        titles = [column.title for column in COLUMNS]
        rows = [
            [
                f"{ratio:,}, {RATES[ratio]}/s, {way}",
                *(column.cell(outcomes[str(ratio), way]) for column in COLUMNS),
                beside(outcomes[str(ratio), way], outcomes[str(ratio), OURS]),
            ]
            for ratio in RATES
            for way in _WAYS
        ]
        return [Table(["t_p / t_l, rate, policy", *titles, "TTFT, TPOT over barrier_time"], rows)]
