"""A trial: one engine under KV pressure with an admission policy."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields
from typing import ClassVar

from loadgen.figures.fingerprints import ADMISSION_FOLDERS
from loadgen.figures.trials import QUICK_SHARE, CommandTrial, Run
from loadgen.simulator.admission.admission_command import AdmissionOptions
from loadgen.simulator.admission.admission_results import AdmissionResult
from loadgen.simulator.admission.admission_simulation import EndlessError, simulate_admission

_KEPT = tuple(each.name for each in fields(AdmissionResult) if each.name != "parameters")
_LEAST_REQUESTS = 20
ENDLESS = "endless"


@dataclass(frozen=True, slots=True)
class AdmissionCase(CommandTrial[AdmissionOptions]):
    """One row of a study.

    A run that evicts the same requests again and again without end has ``endless`` 1 and no
    figures.
    """

    name: ClassVar = "simulate admission"
    always: ClassVar = ("policy", "scenario")
    metrics: ClassVar = (*_KEPT, ENDLESS)
    code: ClassVar = ADMISSION_FOLDERS

    def run(self, seed: int) -> Run:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # The study shows pauses.
            try:
                result = simulate_admission(self.seeded(seed).config())
            except EndlessError:
                return dict.fromkeys(_KEPT) | {ENDLESS: 1}
        return {name: getattr(result, name) for name in _KEPT} | {ENDLESS: 0}

    def shortened(self) -> AdmissionCase:
        requests = self.options.config().scenario.requests // QUICK_SHARE
        return self.shorter(requests=max(_LEAST_REQUESTS, requests))
