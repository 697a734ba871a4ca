"""Trials of server chains: computed properties of a deployment, and simulations of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from loadgen.chains.chains_config import ChainsOptions
from loadgen.chains.chains_results import compare
from loadgen.chains.scenario import BLOOM_176B
from loadgen.figures.fingerprints import CHAIN_FOLDERS, file_of
from loadgen.figures.samples import Sample
from loadgen.figures.trials import QUICK_SHARE, CommandTrial, Run, Trial
from router.commands.json_output import finite
from router.core.errors import InputError
from router.core.placement.model import Model, Server

DEPLOYMENTS = 20
RESPONSE, TAIL = "response_mean_s", "response_p99_s"
WAITING, SERVICE = "waiting_mean_s", "service_mean_s"
LOWER, UPPER = "lower_s", "upper_s"
# Kept metrics of a simulated run.
_KEPT = (
    *(RESPONSE, TAIL, WAITING, SERVICE, LOWER, UPPER),
    *("reserved_slots", "rate", "total_rate"),
)
_NONE = "no_chain"


@dataclass(frozen=True, slots=True)
class ChainCase(CommandTrial[ChainsOptions]):
    """Requests on random deployments, one for each seed.

    A deployment without room for all blocks has ``no_chain`` 1 and no figures.
    """

    seeds: int = field(default=DEPLOYMENTS, kw_only=True)

    name: ClassVar = "simulate chains"
    always: ClassVar = ("policy", "placement")
    metrics: ClassVar = (*_KEPT, _NONE)
    code: ClassVar = CHAIN_FOLDERS

    def seeded(self, seed: int) -> ChainsOptions:
        return replace(self.options, repeats=1, seed=seed)

    def depends_on(self, seed: int) -> list[object]:
        return [dict(self.differs), seed]

    def run(self, seed: int) -> Run:
        try:
            report = compare(self.seeded(seed)).report()
        except InputError:
            return dict.fromkeys(_KEPT) | {_NONE: 1}
        return {name: report[name] for name in _KEPT} | {_NONE: 0}

    def shortened(self) -> ChainCase:
        requests, warmup = (n // QUICK_SHARE for n in (self.options.requests, self.options.warmup))
        return self.shorter(requests=requests, warmup=warmup)


@dataclass(frozen=True, slots=True)
class Computed(Trial):
    """Properties of random deployments that need no simulation."""

    # Module-level function of a seed and ``arguments``; it returns ``metrics``.
    function: Callable[..., Mapping[str, float | None]]
    # Names of the returned values; values that are not finite count as missing.
    metrics: tuple[str, ...]
    arguments: Mapping[str, Any] = field(default_factory=dict)  # JSON-able keyword arguments
    seeds: int = field(default=DEPLOYMENTS, kw_only=True)

    command: ClassVar = None

    @property
    def differs(self) -> Mapping[str, object]:
        return self.arguments

    @property
    def code(self) -> Sequence[str]:
        return (*CHAIN_FOLDERS, file_of(self.function.__module__))

    def depends_on(self, seed: int) -> list[object]:
        return [self.function.__qualname__, dict(self.arguments), seed]

    def run(self, seed: int) -> Run:
        found = self.function(seed, **self.arguments)
        return {name: finite(value) for name, value in found.items()}


def deployment(seed: int, **changes: Any) -> tuple[Model, list[Server]]:
    """Servers drawn for the paper's model, or for one with changed fields of ``Scenario``.

    The seed decides which servers are fast, and how far each is.
    """
    scenario = replace(BLOOM_176B, **changes)
    return scenario.model, scenario.drawn(seed)


def worst_ratio(sample: Sample, one: str, other: str) -> float:
    """Largest ratio of two metrics over the deployments that have both; 0 if none has."""
    pairs = zip(sample.values[one], sample.values[other], strict=True)
    return max((a / b for a, b in pairs if a is not None and b), default=0.0)
