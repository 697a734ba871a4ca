"""The joint plan for prompts beside rules on arrival, from little load to more than is computed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from loadgen.figures.claims import Claim, paired_at_most
from loadgen.figures.fingerprints import SERVING_FOLDERS
from loadgen.figures.laboratory import Laboratory
from loadgen.figures.samples import Outcomes, Sample
from loadgen.figures.serving_cases import ServingCase
from loadgen.figures.studies.serving_study import (
    ALL_TOKENS,
    COLUMNS,
    DECODES,
    FEW_TOKENS,
    JOINT,
    OURS,
    REGIMES,
    TTFT,
    as_good_as_any,
    as_good_as_ours,
    beside,
)
from loadgen.figures.study import SERVING, Study
from loadgen.figures.tables import Table
from loadgen.figures.trials import SEEDS
from router.core.types import Dispatch

OVERLOAD = "11"
_MANY = ("3.5", "5", "7", "8.5", OVERLOAD)
# Tables: the regime, and its rates per second.
SETTINGS: Mapping[str, tuple[str, Sequence[str]]] = MappingProxyType(
    {
        ALL_TOKENS: (ALL_TOKENS, _MANY),
        FEW_TOKENS: (FEW_TOKENS, _MANY),
        "t_p 5e-6": (DECODES, ("16",)),
    }
)
_WAYS = (JOINT, OURS, "least_prefill", "kv_cost")
# There chance is worth a few percent.
_QUIET, _MORE_SEEDS = ("3.5", "5"), 10


class ServingRatesStudy(Study):
    title = "Prompts planned jointly, or sent on arrival, by rate"
    conditions = (
        "As in the studies above, with other rates of arrival. bfio sends from the pool, the rules "
        "on arrival. Ten seeds at 3.5 and 5/s."
    )
    code = SERVING_FOLDERS
    physics = SERVING

    def measure(self, laboratory: Laboratory) -> Outcomes:
        return laboratory.run(
            [
                ServingCase(
                    (setting, rate, way),
                    replace(
                        REGIMES[regime],
                        policy=way,
                        arrivals=f"poisson:{rate}",
                        dispatch=Dispatch.POOL if way == JOINT else Dispatch.INSTANT,
                    ),
                    seeds=_MORE_SEEDS if rate in _QUIET else SEEDS,
                )
                for setting, (regime, rates) in SETTINGS.items()
                for rate in rates
                for way in _WAYS
            ]
        )

    def tables(self, outcomes: Outcomes) -> list[Table]:
        header = [
            "rate, policy",
            *(column.title for column in COLUMNS),
            "TTFT, TPOT over barrier_time",
        ]
        return [
            Table(
                header,
                [
                    [
                        f"{rate}/s, {way}",
                        *(column.cell(sample) for column in COLUMNS),
                        beside(sample, ways[OURS]),
                    ]
                    for rate in rates
                    for ways in [_ways(outcomes, setting, rate)]
                    for way, sample in ways.items()
                ],
                f"{setting}, by rate",
            )
            for setting, (_, rates) in SETTINGS.items()
        ]

    def claims(self, outcomes: Outcomes) -> Iterator[Claim]:
        for setting, (_, rates) in SETTINGS.items():
            for rate in rates:
                ways, text = _ways(outcomes, setting, rate), f"{setting}, {rate}/s"
                if rate == OVERLOAD:
                    said = f"{text}: TTFT, {JOINT} / {OURS}, upper end"
                    yield paired_at_most(said, ways[JOINT], ways[OURS], TTFT.metric, 0.85)
                else:
                    yield from as_good_as_ours(text, ways)
                yield from as_good_as_any(text, ways)


def _ways(outcomes: Outcomes, setting: str, rate: str) -> Mapping[str, Sample]:
    return {way: outcomes[setting, rate, way] for way in _WAYS}
