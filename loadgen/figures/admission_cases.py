"""A trial: one engine under KV pressure with an admission policy."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import ClassVar

from loadgen.figures.commands import differing, typed
from loadgen.figures.fingerprints import ADMISSION_CODE, Code
from loadgen.figures.samples import Key
from loadgen.figures.trials import QUICK_SEEDS, QUICK_SHARE, SEEDS, Run
from loadgen.simulator.admission.admission_command import AdmissionOptions
from loadgen.simulator.admission.admission_results import AdmissionResult
from loadgen.simulator.admission.admission_simulation import EndlessError, simulate_admission

_KEPT = tuple(each.name for each in fields(AdmissionResult) if each.name != "parameters")
_LEAST_REQUESTS = 20
ENDLESS = "endless"


@dataclass(frozen=True, slots=True)
class AdmissionCase:
    """One row of a study.

    A run that evicts the same requests again and again without end has ``endless`` 1 and no
    figures.

    Attributes:
        key: unique key in the study.
        options: options of the command; the seed is replaced.
        seeds: number of repetitions, with the seeds 0, 1, ...
    """

    key: Key
    options: AdmissionOptions
    seeds: int = SEEDS

    metrics: ClassVar[tuple[str, ...]] = (*_KEPT, ENDLESS)
    code: ClassVar[Code] = ADMISSION_CODE

    @property
    def command(self) -> str:
        return typed("evenstep simulate admission", self.differs)

    @property
    def differs(self) -> Mapping[str, object]:
        return differing(self.options, "policy", "scenario")

    def depends_on(self, seed: int) -> list[object]:
        return [replace(self.options, seed=seed).config().described()]

    def run(self, seed: int) -> Run:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # The study shows pauses.
            try:
                result = simulate_admission(replace(self.options, seed=seed).config())
            except EndlessError:
                return dict.fromkeys(_KEPT) | {ENDLESS: 1}
        return {name: getattr(result, name) for name in _KEPT} | {ENDLESS: 0}

    def shortened(self) -> AdmissionCase:
        requests = max(_LEAST_REQUESTS, self.options.config().count // QUICK_SHARE)
        small = replace(self.options, requests=requests)
        return replace(self, options=small, seeds=min(self.seeds, QUICK_SEEDS))
