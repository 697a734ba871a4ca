"""Chains of servers, as trials: what is computed of a deployment, and what is simulated of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from loadgen.chains.command import ChainsOptions
from loadgen.chains.results import compare
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
# What is kept of a simulated run.
_KEPT = (
    *(RESPONSE, TAIL, WAITING, SERVICE, LOWER, UPPER),
    *("reserved_slots", "rate", "total_rate"),
)
_NONE = "no_chain"


@dataclass(frozen=True, slots=True)
class ChainCase:
    """Requests on a random deployment.

    A deployment on which the placement finds no place for all blocks has ``no_chain`` 1 and no
    figures.

    Attributes:
        key: unlike all others of the study.
        options: as on the command line; the seed is replaced.
        seeds: deployments with their requests, with the seeds 0, 1, ...
    """

    key: Key
    options: ChainsOptions
    seeds: int = DEPLOYMENTS

    metrics: ClassVar[tuple[str, ...]] = (*_KEPT, _NONE)

    @property
    def command(self) -> str:
        """What repeats the first deployment."""
        return typed("evenstep simulate chains", self.differs)

    @property
    def differs(self) -> Mapping[str, object]:
        """Options that are not the defaults."""
        return differing(replace(self.options, repeats=1), "policy", "placement")

    @property
    def code(self) -> Code:
        """All that places and simulates chains."""
        return chain_code()

    def depends_on(self, seed: int) -> list[object]:
        """All that a run follows from, but the code."""
        return [dict(self.differs), seed]

    def run(self, seed: int) -> Run:
        """One simulation."""
        try:
            report = compare(replace(self.options, repeats=1, seed=seed).config()).report()
        except InputError:
            return dict.fromkeys(_KEPT) | {_NONE: 1}
        return {name: report[name] for name in _KEPT} | {_NONE: 0}

    def shortened(self) -> ChainCase:
        """Fewer requests and deployments."""
        requests, warmup = (n // QUICK_SHARE for n in (self.options.requests, self.options.warmup))
        small = replace(self.options, requests=requests, warmup=warmup)
        return replace(self, options=small, seeds=min(self.seeds, QUICK_SEEDS))


@dataclass(frozen=True, slots=True)
class Computed:
    """Numbers of a random deployment that follow without a simulation.

    Attributes:
        key: unlike all others of the study.
        function: of a module; takes a seed and ``arguments`` by their names, returns ``metrics``.
        arguments: JSON-able.
        metrics: what it returns; what is not finite counts as missing.
        seeds: deployments, with the seeds 0, 1, ...
    """

    key: Key
    function: Callable[..., Mapping[str, float | None]]
    metrics: tuple[str, ...]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    seeds: int = DEPLOYMENTS

    @property
    def command(self) -> None:
        """No command line says it."""

    @property
    def differs(self) -> Mapping[str, object]:
        """All that is told to the function."""
        return self.arguments

    @property
    def code(self) -> Code:
        """Placement, and where the function is."""
        return chain_code(self.function.__module__)

    def depends_on(self, seed: int) -> list[object]:
        """All that a run follows from, but the code."""
        return [self.function.__qualname__, dict(self.arguments), seed]

    def run(self, seed: int) -> Run:
        """The numbers of one deployment."""
        found = self.function(seed, **self.arguments)
        return {name: finite(value) for name, value in found.items()}

    def shortened(self) -> Computed:
        """Fewer deployments."""
        return replace(self, seeds=min(self.seeds, QUICK_SEEDS))


def deployment(seed: int, **changes: Any) -> tuple[Model, list[Server]]:
    """The paper's model and servers, drawn.

    Args:
        seed: of which servers are fast, and how far each is.
        changes: of the fields of ``Scenario``.
    """
    scenario = replace(BLOOM_176B, **changes)
    return scenario.model, scenario.drawn(seed)


def worst_ratio(sample: Sample, one: str, other: str) -> float:
    """The largest ratio of two metrics over the deployments that have both; 0 where none has."""
    pairs = zip(sample.values[one], sample.values[other], strict=True)
    return max((a / b for a, b in pairs if a is not None and b), default=0.0)
