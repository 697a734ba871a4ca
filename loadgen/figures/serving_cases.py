"""A trial: whole engines under a policy, which may be a rule with other weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import ClassVar

from loadgen.figures.fingerprints import SERVING_FOLDERS, file_of
from loadgen.figures.trials import QUICK_SHARE, CommandTrial, Run
from loadgen.simulator.serving.serving_command import ServingOptions
from loadgen.simulator.serving.serving_results import ServingResult
from loadgen.simulator.serving.serving_simulation import simulate_serving
from router.core.policies.policy_protocol import Policy

_KEPT = tuple(
    each.name for each in fields(ServingResult) if each.name not in ("parameters", "records")
)
_LEAST_REQUESTS = 20


@dataclass(frozen=True, slots=True)
class ServingCase(CommandTrial[ServingOptions]):
    """One row of a study."""

    # Policy by seed, in place of the one of the options, with its numbers as arguments; None: that
    # one.
    make: partial[Policy] | None = None

    name: ClassVar = "simulate serving"
    always: ClassVar = ("policy",)
    metrics: ClassVar = _KEPT

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
        return {name: getattr(result, name) for name in _KEPT}

    def shortened(self) -> ServingCase:
        requests = self.options.requests // QUICK_SHARE
        return self.shorter(requests=max(_LEAST_REQUESTS, requests))
