"""Options of one simulation of chains, and the chains that follow from them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Any

from loadgen.chains.chain_simulation import check_of_chains
from loadgen.chains.placements import PETALS_SLOTS, bprr, petals, whole
from loadgen.chains.scenario import SCENARIOS, Scenario
from loadgen.chains.work import Arrivals, Measured, Service, Work, draw_work
from loadgen.model.ranges import check_ranges
from loadgen.run.options import JsonFlag, trace_flag
from loadgen.traces.trace import load_trace
from router.commands.options import flag
from router.config.worker_notation import unknown
from router.core.errors import ConfigError
from router.core.placement.gbp_cr import gbp_cr
from router.core.placement.gca import gca
from router.core.placement.model import Chain, Placement, Server, total_rate
from router.core.placement.tuning import Criterion, compose
from router.core.policies.policy_table import POLICIES
from router.core.types import Dispatch

_TRACE = "azure-conv"
_MOST_REPEATS = 1000
_RANGES: dict[str, tuple[float, float]] = {
    "requests": (1, 10_000_000),
    "warmup": (0, 10_000_000),
    "repeats": (1, _MOST_REPEATS),
    "seed": (0, 2**32 - 1),
    "reserved": (1, 1_000_000),
    "rate": (1e-9, 1e6),
    "load": (1e-9, 10),
    "target_load": (1e-9, 1),
}


class Blocks(StrEnum):
    """Placement of blocks."""

    GBP_CR = "gbp_cr"
    PETALS = "petals"
    BPRR = "bprr"
    WHOLE = "whole"


class Allocation(StrEnum):
    """How memory becomes slots: reserved ahead for chains, or per request at its start."""

    GCA = "gca"
    DISJOINT = "disjoint"
    ILP = "ilp"
    DYNAMIC = "dynamic"


_USUAL: Mapping[Blocks, Allocation] = {
    Blocks.GBP_CR: Allocation.GCA,
    Blocks.PETALS: Allocation.DYNAMIC,
    Blocks.BPRR: Allocation.DYNAMIC,
    Blocks.WHOLE: Allocation.DISJOINT,
}


@dataclass(frozen=True, slots=True)
class ChainsOptions:
    """One simulation of requests on chains, as options of its command.

    ConfigError names an invalid option; InputError: no such trace, or one without times.
    """

    policy: Annotated[
        str,
        flag(
            "One or several, compared on the same requests: "
            f"{', '.join(name for name, row in POLICIES.items() if not row.looks_ahead)}.",
            "P[,P]",
        ),
    ] = "jffc"
    scenario: Annotated[str, flag(f"Servers and model: {', '.join(SCENARIOS)}.", "NAME")] = (
        "bloom176b"
    )
    servers: Annotated[int | None, flag("How many [the scenario's].", "J")] = None
    fast_share: Annotated[
        float | None, flag("Share of them that is fast [the scenario's].", "ETA")
    ] = None
    rate: Annotated[
        float | None, flag("Requests/s that blocks are placed for [the scenario's].", "R")
    ] = None
    load: Annotated[
        float | None,
        flag("Requests come at this share of what all chains complete [at --rate].", "X"),
    ] = None
    target_load: Annotated[
        float, flag("Highest share of their rate that chains are planned for.", "RHO")
    ] = 0.7
    placement: Annotated[Blocks, flag("Who places blocks.")] = Blocks.GBP_CR
    allocation: Annotated[
        Allocation | None,
        flag(
            "How memory becomes slots: chains that share servers, that do not, the fewest "
            "slots that suffice (HiGHS), or no chains: each request finds its way [by the "
            "placement]."
        ),
    ] = None
    reserved: Annotated[
        int | None, flag("Slots kept free for each block [tuned; petals 2; bprr by the rate].", "C")
    ] = None
    tune_by: Annotated[Criterion, flag("What the reserved slots are tuned by, with gbp_cr.")] = (
        Criterion.LOWER
    )
    requests: Annotated[int, flag("How many come, in each repeat.", "N")] = 20_000
    warmup: Annotated[int, flag("Of these, left out of the averages.", "N")] = 2_000
    repeats: Annotated[int, flag("With other requests, on the same servers.", "N")] = 5
    seed: Annotated[int, flag("Of servers, requests and random choices.", "S")] = 0
    arrivals: Annotated[Arrivals, flag("Poisson, or a trace's gaps, stretched to the rate.")] = (
        Arrivals.POISSON
    )
    service: Annotated[
        Service, flag("Work: exponential, or by the lengths of a trace's requests.")
    ] = Service.EXPONENTIAL
    trace: Annotated[str | None, trace_flag(_TRACE)] = None
    dispatch: Annotated[
        Dispatch,
        flag(
            "From one queue when a slot is free, or at once on arrival; of several policies, those "
            "that cannot do that keep the one queue."
        ),
    ] = Dispatch.POOL
    json_file: JsonFlag = None

    def __post_init__(self) -> None:
        if self.scenario not in SCENARIOS:
            raise ConfigError(f"--scenario: {unknown('scenario', self.scenario, SCENARIOS)}")
        check_ranges(self, _RANGES)
        if self.trace is not None and not self._reads_trace:
            raise ConfigError("--trace does nothing without --arrivals trace or --service trace")
        if self.warmup >= self.requests:
            raise ConfigError(
                f"--warmup {self.warmup} leaves none of the {self.requests} --requests to measure"
            )
        self._check_policies()

    @property
    def deployment(self) -> Scenario:
        """Servers and model."""
        changes = {"servers": self.servers, "fast_share": self.fast_share}
        given: Any = {name: value for name, value in changes.items() if value is not None}
        return replace(SCENARIOS[self.scenario], **given)

    @property
    def policies(self) -> list[str]:
        return self.policy.split(",")

    @property
    def planned_rate(self) -> float:
        return self.deployment.rate if self.rate is None else self.rate

    @property
    def allocated(self) -> Allocation:
        return self.allocation or _USUAL[self.placement]

    def dispatch_of(self, policy: str) -> Dispatch:
        offered = POLICIES[policy].dispatch if policy in POLICIES else ()
        lone = len(self.policies) == 1
        return self.dispatch if lone or self.dispatch in offered else Dispatch.POOL

    def works(self, rate: float) -> list[Work]:
        """The requests of each repeat."""
        measured = None
        if self._reads_trace:
            timed = self.arrivals is Arrivals.TRACE
            measured = Measured.of(load_trace(self.trace or _TRACE), self.deployment, timed=timed)
        seeds = (self.seed * _MOST_REPEATS + repeat for repeat in range(self.repeats))
        return [
            draw_work(rate, self.requests, seed, self.arrivals, self.service, measured)
            for seed in seeds
        ]

    @property
    def _reads_trace(self) -> bool:
        return self.arrivals is Arrivals.TRACE or self.service is Service.TRACE

    def _check_policies(self) -> None:
        if len(set(self.policies)) < len(self.policies):
            raise ConfigError("--policy: each one once")
        for policy in self.policies:
            check_of_chains(policy, self.dispatch_of(policy))
        if self.allocated is Allocation.DYNAMIC and self.policies != ["jffc"]:
            raise ConfigError(
                "--policy does nothing with --allocation dynamic: each request takes the fastest "
                "path that is free; leave it out, or take --allocation gca"
            )
        if self.reserved is not None and self.placement is Blocks.WHOLE:
            raise ConfigError("--reserved does nothing with --placement whole")
        made = self.placement in (Blocks.GBP_CR, Blocks.WHOLE)
        if self.allocated is Allocation.DISJOINT and not made:
            raise ConfigError(f"--allocation disjoint: {self.placement} makes no such chains")


@dataclass(frozen=True, slots=True)
class Composed:
    """Servers that are ready to serve."""

    placement: Placement
    chains: tuple[Chain, ...]  # fastest first; empty if each request chooses its own path
    reserved_slots: int  # c, slots kept free for each block at the placement

    @property
    def total_rate(self) -> float:
        """Requests per second that all chains complete; without chains, those of GCA."""
        return total_rate(self.chains or gca(self.placement))


def composed(options: ChainsOptions) -> Composed:
    """Place blocks and allocate memory.

    ConfigError: the reserved slots leave no chain, or HiGHS is missing. InputError: blocks find no
    place, or the program has no solution. PlacementError: no memory for the model and a request.
    """
    servers = options.deployment.drawn(options.seed)
    placement, disjoint, reserved = _placed(options, servers)
    allocation = options.allocated
    if allocation is Allocation.DYNAMIC:
        return Composed(placement, (), reserved)
    chains = disjoint if allocation is Allocation.DISJOINT else gca(placement)
    if allocation is Allocation.ILP:
        try:
            from loadgen.chains.ilp import fewest_slots
        except ImportError as error:
            raise ConfigError(
                f"--allocation ilp needs HiGHS ({error}); install it with: pip install highspy "
                "(it is in the extra dev of evenstep)"
            ) from error
        chains = fewest_slots(chains, placement, options.planned_rate / options.target_load)
    by_speed = sorted(chains, key=lambda chain: chain.service_s)
    return Composed(placement, tuple(by_speed), reserved)


def _placed(
    options: ChainsOptions, servers: list[Server]
) -> tuple[Placement, tuple[Chain, ...], int]:
    """The placement, its own disjoint chains (if it makes any), and the reserved slots."""
    model, rate, reserved = options.deployment.model, options.planned_rate, options.reserved
    match options.placement:
        case Blocks.PETALS:
            slots = PETALS_SLOTS if reserved is None else reserved
            return petals(model, servers, slots), (), slots
        case Blocks.BPRR:
            placement, slots = bprr(model, servers, rate, reserved)
            return placement, (), slots
        case Blocks.WHOLE:
            return *whole(model, servers), 1
    if reserved is None:
        overlapping = options.allocated is not Allocation.DISJOINT
        best = compose(model, servers, rate, options.target_load, options.tune_by, overlapping)
        return best.placement, best.disjoint, best.reserved_slots
    grouping = gbp_cr(model, servers, reserved, rate, options.target_load)
    if not grouping.chains:
        raise ConfigError(
            f"--reserved {reserved} leaves too little memory: {len(servers)} servers hold "
            f"no chain of {model.blocks} blocks; lower it, or give more --servers"
        )
    return grouping.placement, grouping.chains, reserved
