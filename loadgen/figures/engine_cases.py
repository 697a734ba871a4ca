"""Trials of engines: one under KV pressure with an admission policy, and many under a policy.

The policy of many may be a rule with other weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import ClassVar

from loadgen.figures.fingerprints import ADMISSION_FOLDERS, SERVING_FOLDERS, file_of
from loadgen.figures.trials import QUICK_SHARE, CommandTrial, Run
from loadgen.simulator.admission.admission_command import AdmissionOptions
from loadgen.simulator.admission.admission_results import AdmissionResult
from loadgen.simulator.admission.admission_simulation import EndlessError, simulate_admission
from loadgen.simulator.serving.serving_command import ServingOptions
from loadgen.simulator.serving.serving_results import ServingResult
from loadgen.simulator.serving.serving_simulation import simulate_serving
from router.core.policies.policy_protocol import Policy

_LEAST_REQUESTS = 20
_ADMISSION_KEPT = tuple(each.name for each in fields(AdmissionResult) if each.name != "parameters")
ENDLESS = "endless"


@dataclass(frozen=True, slots=True)
class AdmissionCase(CommandTrial[AdmissionOptions]):
    """One row of a study.

    A run that evicts the same requests again and again without end has ``endless`` 1 and no
    figures.
    """

    name: ClassVar = "simulate admission"
    always: ClassVar = ("policy", "scenario")
    metrics: ClassVar = (*_ADMISSION_KEPT, ENDLESS)
    code: ClassVar = ADMISSION_FOLDERS

    def run(self, seed: int) -> Run:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # The study shows pauses.
            try:
                result = simulate_admission(self.seeded(seed).config())
            except EndlessError:
                return dict.fromkeys(_ADMISSION_KEPT) | {ENDLESS: 1}
        return {name: getattr(result, name) for name in _ADMISSION_KEPT} | {ENDLESS: 0}

    def shortened(self) -> AdmissionCase:
        requests = self.options.config().scenario.requests // QUICK_SHARE
        return self.shorter(requests=max(_LEAST_REQUESTS, requests))


_SERVING_KEPT = tuple(
    each.name for each in fields(ServingResult) if each.name not in ("parameters", "records")
)


@dataclass(frozen=True, slots=True)
class ServingCase(CommandTrial[ServingOptions]):
    """One row of a study."""

    # Policy by seed, in place of the one of the options, with its numbers as arguments; None: that
    # one.
    make: partial[Policy] | None = None

    name: ClassVar = "simulate serving"
    always: ClassVar = ("policy",)
    metrics: ClassVar = _SERVING_KEPT

    @property
    def code(self) -> Sequence[str]:
        own = [file_of(self.make.func.__module__)] if self.make else []
        return (*SERVING_FOLDERS, *own)

    @property
    def command(self) -> str | None:
        return None if self.make else super(ServingCase, self).command

    def depends_on(self, seed: int) -> list[object]:
        made = (*self.key, repr(self.make.args)) if self.make else ()
        return [*super(ServingCase, self).depends_on(seed), *made]

    def run(self, seed: int) -> Run:
        policy = self.make(seed) if self.make else None
        result = simulate_serving(self.seeded(seed).config(), policy=policy)
        return {name: getattr(result, name) for name in _SERVING_KEPT}

    def shortened(self) -> ServingCase:
        requests = self.options.requests // QUICK_SHARE
        return self.shorter(requests=max(_LEAST_REQUESTS, requests))
