"""Trials of server chains: computed properties of a deployment, and simulations of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from loadgen.chains.chains_command import ChainsOptions
from loadgen.chains.chains_results import compare
from loadgen.chains.scenario import BLOOM_176B
from loadgen.figures.commands import differing, typed
from loadgen.figures.fingerprints import Code, chain_code
from loadgen.figures.samples import Key, Sample
from loadgen.figures.trials import QUICK_SEEDS, QUICK_SHARE, Run
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
class ChainCase:
    """Requests on a random deployment.

    A deployment without room for all blocks has ``no_chain`` 1 and no figures.

    Attributes:
        key: unique key in the study.
        options: options of the command; the seed is replaced.
        seeds: number of deployments with their requests, with the seeds 0, 1, ...
    """

    key: Key
    options: ChainsOptions
    seeds: int = DEPLOYMENTS

    metrics: ClassVar[tuple[str, ...]] = (*_KEPT, _NONE)

    @property
    def command(self) -> str:
        return typed("evenstep simulate chains", self.differs)

    @property
    def differs(self) -> Mapping[str, object]:
        return differing(replace(self.options, repeats=1), "policy", "placement")

    @property
    def code(self) -> Code:
        return chain_code()

    def depends_on(self, seed: int) -> list[object]:
        return [dict(self.differs), seed]

    def run(self, seed: int) -> Run:
        try:
            report = compare(replace(self.options, repeats=1, seed=seed).config()).report()
        except InputError:
            return dict.fromkeys(_KEPT) | {_NONE: 1}
        return {name: report[name] for name in _KEPT} | {_NONE: 0}

    def shortened(self) -> ChainCase:
        requests, warmup = (n // QUICK_SHARE for n in (self.options.requests, self.options.warmup))
        small = replace(self.options, requests=requests, warmup=warmup)
        return replace(self, options=small, seeds=min(self.seeds, QUICK_SEEDS))


@dataclass(frozen=True, slots=True)
class Computed:
    """Properties of a random deployment that need no simulation.

    Attributes:
        key: unique key in the study.
        function: module-level function of a seed and ``arguments``; it returns ``metrics``.
        arguments: JSON-able keyword arguments.
        metrics: names of the returned values; values that are not finite count as missing.
        seeds: number of deployments, with the seeds 0, 1, ...
    """

    key: Key
    function: Callable[..., Mapping[str, float | None]]
    metrics: tuple[str, ...]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    seeds: int = DEPLOYMENTS

    @property
    def command(self) -> None:
        """There is no such command."""

    @property
    def differs(self) -> Mapping[str, object]:
        """All arguments of the function."""
        return self.arguments

    @property
    def code(self) -> Code:
        """The placement's code and the function's module."""
        return chain_code(self.function.__module__)

    def depends_on(self, seed: int) -> list[object]:
        return [self.function.__qualname__, dict(self.arguments), seed]

    def run(self, seed: int) -> Run:
        found = self.function(seed, **self.arguments)
        return {name: finite(value) for name, value in found.items()}

    def shortened(self) -> Computed:
        return replace(self, seeds=min(self.seeds, QUICK_SEEDS))


def deployment(seed: int, **changes: Any) -> tuple[Model, list[Server]]:
    """Draw servers for the paper's model.

    Args:
        seed: seed that decides which servers are fast, and how far each is.
        changes: fields of ``Scenario`` to replace.
    """
    scenario = replace(BLOOM_176B, **changes)
    return scenario.model, scenario.drawn(seed)


def worst_ratio(sample: Sample, one: str, other: str) -> float:
    """Largest ratio of two metrics over the deployments that have both; 0 if none has."""
    pairs = zip(sample.values[one], sample.values[other], strict=True)
    return max((a / b for a, b in pairs if a is not None and b), default=0.0)
