"""A trial: whole engines under a policy, which may be a rule with other weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import ClassVar

from loadgen.figures.commands import differing, typed
from loadgen.figures.fingerprints import Code, serving_code
from loadgen.figures.samples import Key
from loadgen.figures.trials import QUICK_SEEDS, QUICK_SHARE, SEEDS, Run
from loadgen.simulator.serving.serving_command import ServingOptions
from loadgen.simulator.serving.serving_results import ServingResult
from loadgen.simulator.serving.serving_simulation import simulate_serving
from router.core.policies.policy_protocol import Policy

_KEPT = tuple(
    each.name for each in fields(ServingResult) if each.name not in ("parameters", "records")
)
_LEAST_REQUESTS = 20


@dataclass(frozen=True, slots=True)
class ServingCase:
    """One row of a study.

    Attributes:
        key: unique key in the study.
        options: options of the command; the seed is replaced.
        make: policy by seed, in place of the one of the options, with its numbers as arguments;
            None: that one.
        seeds: number of repetitions, with the seeds 0, 1, ...
    """

    key: Key
    options: ServingOptions
    make: partial[Policy] | None = None
    seeds: int = SEEDS

    metrics: ClassVar[tuple[str, ...]] = _KEPT

    @property
    def code(self) -> Code:
        return serving_code(self.options.policy)

    @property
    def command(self) -> str | None:
        return None if self.make else typed("evenstep simulate serving", self.differs)

    @property
    def differs(self) -> Mapping[str, object]:
        return differing(self.options, "policy")

    def depends_on(self, seed: int) -> list[object]:
        made = () if self.make is None else (*self.key, repr(self.make.args))
        return [replace(self.options, seed=seed).config().described(), *made]

    def run(self, seed: int) -> Run:
        config = replace(self.options, seed=seed).config()
        policy = None if self.make is None else self.make(seed)
        result = simulate_serving(config, policy=policy)
        return {name: getattr(result, name) for name in _KEPT}

    def shortened(self) -> ServingCase:
        requests = max(_LEAST_REQUESTS, self.options.requests // QUICK_SHARE)
        small = replace(self.options, requests=requests)
        return replace(self, options=small, seeds=min(self.seeds, QUICK_SEEDS))
