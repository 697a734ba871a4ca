"""Settings of one simulation of chains, and the chains that follow from them."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from loadgen.chains.chain_simulation import check_policy
from loadgen.chains.placements import PETALS_SLOTS, bprr, petals, whole
from loadgen.chains.scenario import Scenario
from loadgen.chains.work import Arrivals, Measured, Service, Work, draw_work
from router.core.errors import ConfigError
from router.core.placement.gbp_cr import gbp_cr
from router.core.placement.gca import gca
from router.core.placement.model import Chain, Placement, Server, total_rate
from router.core.placement.tuning import Criterion, compose
from router.core.policies.policy_table import POLICIES
from router.core.types import Dispatch

_RANGES = {
    "requests": (1, 10_000_000),
    "warmup": (0, 10_000_000),
    "repeats": (1, 1000),
    "seed": (0, 2**32 - 1),
    "reserved": (1, 1_000_000),
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


_USUAL: Mapping[Blocks, Allocation] = MappingProxyType(
    {
        Blocks.GBP_CR: Allocation.GCA,
        Blocks.PETALS: Allocation.DYNAMIC,
        Blocks.BPRR: Allocation.DYNAMIC,
        Blocks.WHOLE: Allocation.DISJOINT,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainsConfig:
    """One simulation of requests on chains; ConfigError names the option of an invalid setting."""

    scenario: Scenario
    policies: tuple[str, ...] = ("jffc",)  # compared on the same requests
    # Lambda, requests per second that the placement assumes; None: the scenario's.
    rate: float | None = None
    # Arrival rate as a share of the rate of all chains; None: arrivals at ``rate``.
    load: float | None = None
    target_load: float = 0.7  # rho, highest planned utilization of the chains
    blocks: Blocks = Blocks.GBP_CR
    allocation: Allocation | None = None  # None: the usual one of the placement
    # c, slots kept free for each block; None: tuned, or the placement's own.
    reserved: int | None = None
    tune_by: Criterion = Criterion.LOWER
    requests: int = 20_000
    warmup: int = 2_000  # first requests left out of the averages
    repeats: int = 5
    seed: int = 0
    arrivals: Arrivals = Arrivals.POISSON
    service: Service = Service.EXPONENTIAL
    measured: Measured | None = None  # gaps and work of a trace, for the laws that use one
    # Among several policies, those without this form keep the pool.
    dispatch: Dispatch = Dispatch.POOL

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ConfigError(f"--{name} must be from {least} to {most:,}, got {value}")
        if self.warmup >= self.requests:
            raise ConfigError(
                f"--warmup {self.warmup} leaves none of the {self.requests} --requests to measure"
            )
        if not 1e-9 <= self.planned_rate <= 1e6:
            raise ConfigError(
                f"--rate must be from 1e-09 to 1e+06 requests per second, got {self.planned_rate:g}"
            )
        if self.load is not None and not 0 < self.load <= 10:
            raise ConfigError(f"--load must be above 0 and at most 10, got {self.load:g}")
        if not 0 < self.target_load <= 1:
            raise ConfigError(
                f"--target-load must be above 0 and at most 1, got {self.target_load:g}"
            )
        self._check_policies()

    @property
    def planned_rate(self) -> float:
        return self.scenario.rate if self.rate is None else self.rate

    @property
    def allocated(self) -> Allocation:
        return self.allocation or _USUAL[self.blocks]

    def dispatch_of(self, policy: str) -> Dispatch:
        offered = POLICIES[policy].dispatch if policy in POLICIES else ()
        lone = len(self.policies) == 1
        return self.dispatch if lone or self.dispatch in offered else Dispatch.POOL

    def work(self, repeat: int, rate: float) -> Work:
        seed = self.seed * _RANGES["repeats"][1] + repeat
        return draw_work(rate, self.requests, seed, self.arrivals, self.service, self.measured)

    def _check_policies(self) -> None:
        if len(set(self.policies)) < len(self.policies):
            raise ConfigError("--policy: each one once")
        for policy in self.policies:
            check_policy(policy, self.dispatch_of(policy))
        if self.allocated is Allocation.DYNAMIC and self.policies != ("jffc",):
            raise ConfigError(
                "--policy does nothing with --allocation dynamic: each request takes the fastest "
                "path that is free; leave it out, or take --allocation gca"
            )
        if self.reserved is not None and self.blocks is Blocks.WHOLE:
            raise ConfigError("--reserved does nothing with --placement whole")
        made = self.blocks in (Blocks.GBP_CR, Blocks.WHOLE)
        if self.allocated is Allocation.DISJOINT and not made:
            raise ConfigError(f"--allocation disjoint: {self.blocks} makes no such chains")


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


def composed(config: ChainsConfig) -> Composed:
    """Place blocks and allocate memory.

    ConfigError: the reserved slots leave no chain, or HiGHS is missing. InputError: blocks find no
    place, or the program has no solution. PlacementError: no memory for the model and a request.
    """
    servers = config.scenario.drawn(config.seed)
    placement, disjoint, reserved = _placed(config, servers)
    allocation = config.allocated
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
        chains = fewest_slots(chains, placement, config.planned_rate / config.target_load)
    by_speed = sorted(chains, key=lambda chain: chain.service_s)
    return Composed(placement, tuple(by_speed), reserved)


def _placed(
    config: ChainsConfig, servers: list[Server]
) -> tuple[Placement, tuple[Chain, ...], int]:
    """The placement, its own disjoint chains (if it makes any), and the reserved slots."""
    model, rate, reserved = config.scenario.model, config.planned_rate, config.reserved
    match config.blocks:
        case Blocks.PETALS:
            slots = PETALS_SLOTS if reserved is None else reserved
            return petals(model, servers, slots), (), slots
        case Blocks.BPRR:
            placement, slots = bprr(model, servers, rate, reserved)
            return placement, (), slots
        case Blocks.WHOLE:
            return *whole(model, servers), 1
    if reserved is None:
        overlapping = config.allocated is not Allocation.DISJOINT
        best = compose(model, servers, rate, config.target_load, config.tune_by, overlapping)
        return best.placement, best.disjoint, best.reserved_slots
    grouping = gbp_cr(model, servers, reserved, rate, config.target_load)
    if not grouping.chains:
        raise ConfigError(
            f"--reserved {reserved} leaves too little memory: {len(servers)} servers hold "
            f"no chain of {model.blocks} blocks; lower it, or give more --servers"
        )
    return grouping.placement, grouping.chains, reserved
