"""Prompts planned jointly or sent on arrival: without prefixes, and where clients wait."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

from loadgen.figures.claims import Claim, at_least, paired_at_most
from loadgen.figures.fingerprints import SERVING_FOLDERS
from loadgen.figures.laboratory import Laboratory
from loadgen.figures.samples import Outcomes, Sample
from loadgen.figures.serving_cases import ServingCase
from loadgen.figures.studies.serving_study import (
    ALL_TOKENS,
    COLUMNS,
    DECODES,
    JOINT,
    OURS,
    REGIMES,
    TPOT,
    as_good_as_any,
    as_good_as_ours,
    beside,
)
from loadgen.figures.study import SERVING, Study
from loadgen.figures.tables import Column, Table
from loadgen.figures.trials import SEEDS
from loadgen.simulator.serving.serving_command import ServingOptions
from router.core.types import Dispatch

_LENGTHS, _WAITING, _SHORT = (
    "Azure conversation lengths, no prefixes",
    "clients that wait for answers",
    "32 slots a rank",
)
_BASE = REGIMES[ALL_TOKENS]
# Tables, and by name of the load what arrives. With Azure lengths rules on arrival reach 39
# requests a second.
SETTINGS: Mapping[str, Mapping[str, ServingOptions]] = MappingProxyType(
    {
        _LENGTHS: {
            "70 %": replace(_BASE, trace="azure-conv", arrivals="poisson:27"),
            "95 %": replace(_BASE, trace="azure-conv", arrivals="poisson:37"),
            "115 %": replace(_BASE, trace="azure-conv", arrivals="poisson:45"),
        },
        _WAITING: {
            "5 sessions/s": replace(_BASE, think=10.0, arrivals="poisson:5"),
            "128 clients": replace(_BASE, arrivals="closed:128"),
        },
        _SHORT: {
            "prefixes, 384 clients": replace(_BASE, arrivals="closed:384", slots=32),
            "Azure, 45/s": replace(_BASE, trace="azure-conv", arrivals="poisson:45", slots=32),
        },
    }
)
_WAYS = (JOINT, OURS, "least_prefill", "kv_cost")
_THROUGHPUT = Column("tok/s", "throughput_tok_s", 1.0, 0)
_COLUMNS = (*COLUMNS, _THROUGHPUT)


class ServingTrafficStudy(Study):
    title = "Prompts planned jointly, without prefixes and where clients wait"
    conditions = (
        "As in the studies above, 2,048 tokens a step. Azure conversation lengths (azure-conv) "
        "share no prefixes; 70, 95 and 115 % of what rules on arrival serve. In sessions a prompt "
        "that continues another comes 10 s after its answer (mean, exponential): 122 of 2,500 do. "
        "A client sends its next request when it has the answer to the last. With 32 slots a rank "
        "more requests wait than there are free slots: with prefixes (mooncake-synthetic) the plan "
        "decides all the same, without them the program."
    )
    code = SERVING_FOLDERS
    physics = SERVING
    settings: ClassVar[Mapping[str, Mapping[str, ServingOptions]]] = SETTINGS
    ways: ClassVar[Sequence[str]] = _WAYS
    seeds: ClassVar[int] = SEEDS

    def measure(self, laboratory: Laboratory) -> Outcomes:
        return laboratory.run(
            [
                ServingCase(
                    (setting, load, way),
                    replace(
                        options,
                        policy=way,
                        dispatch=Dispatch.POOL if way == JOINT else Dispatch.INSTANT,
                    ),
                    seeds=self.seeds,
                )
                for setting, loads in self.settings.items()
                for load, options in loads.items()
                for way in self.ways
            ]
        )

    def tables(self, outcomes: Outcomes) -> list[Table]:
        titles = [column.title for column in _COLUMNS]
        header = ["load, policy", *titles, "TTFT, TPOT over barrier_time"]
        return [
            Table(
                header,
                [
                    [
                        f"{load}, {way}",
                        *(column.cell(sample) for column in _COLUMNS),
                        beside(sample, ways[OURS]),
                    ]
                    for load in loads
                    for ways in [self._ways(outcomes, setting, load)]
                    for way, sample in ways.items()
                ],
                setting,
            )
            for setting, loads in self.settings.items()
        ]

    def claims(self, outcomes: Outcomes) -> Iterator[Claim]:
        for setting, loads in self.settings.items():
            for load in loads:
                ways, text = self._ways(outcomes, setting, load), f"{setting}, {load}"
                yield from as_good_as_ours(text, ways)
                yield from as_good_as_any(text, ways)
                if setting == _LENGTHS:
                    ours, theirs = ways[JOINT], ways["least_prefill"]
                    said = f"{text}: {{}}, {JOINT} / least_prefill".format
                    yield paired_at_most(said("TPOT"), ours, theirs, TPOT.metric, 1.0)
                    ratio = ours.ratio(theirs, _THROUGHPUT.metric)
                    yield at_least(said("throughput"), ratio, 1.0)

    def _ways(self, outcomes: Outcomes, setting: str, load: str) -> Mapping[str, Sample]:
        return {way: outcomes[setting, load, way] for way in self.ways}


_ALONE: Mapping[str, Any] = {"barrier": False, "requests": 800}


class ServingAloneStudy(ServingTrafficStudy):
    title = "Prompts planned jointly, before replicas that step alone"
    conditions = (
        "As in the studies above, without a barrier, with the first 800 requests and three seeds."
    )
    settings: ClassVar[Mapping[str, Mapping[str, ServingOptions]]] = MappingProxyType(
        {
            "without a barrier": {
                "t_p 5e-5, 7/s": replace(_BASE, **_ALONE),
                "t_p 5e-6, 16/s": replace(REGIMES[DECODES], **_ALONE),
            }
        }
    )
    ways: ClassVar[Sequence[str]] = (*_WAYS, "prefix_score")
    seeds: ClassVar[int] = 3

    def claims(self, outcomes: Outcomes) -> Iterator[Claim]:
        for setting, loads in self.settings.items():
            for load in loads:
                yield from as_good_as_any(f"{setting}, {load}", self._ways(outcomes, setting, load))
