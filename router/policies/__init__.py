"""All policies by name: to add one, write a function or class, a row here, and a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from router.policies import baselines
from router.policies.baselines import PerRequest
from router.policies.bfio import BfIo
from router.types import Dispatch, Policy

ANY = frozenset(Dispatch)
POOL_ONLY = frozenset({Dispatch.POOL})


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """What a policy may be told at its making.

    Attributes:
        seed: of its random choices.
        tie_weight: mu of BF-IO's quadratic term, in 1/tokens.
    """

    seed: int = 0
    tie_weight: float = 0.1


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """A policy's maker, the forms of dispatch that it can do, and one line on it."""

    make: Callable[[PolicySettings], Policy]
    summary: str
    dispatch: frozenset[Dispatch] = ANY


POLICIES: Mapping[str, PolicyRow] = MappingProxyType(
    {
        "bfio": PolicyRow(
            lambda settings: BfIo(settings.tie_weight),
            "the whole pool at once, so that the most loaded worker waits least for the others",
        ),
        "fcfs": PolicyRow(
            lambda _: PerRequest(baselines.fcfs),
            "first worker with a free slot",
            dispatch=POOL_ONLY,
        ),
        "jsq": PolicyRow(lambda _: PerRequest(baselines.jsq), "fewest requests"),
        "least_tokens": PolicyRow(lambda _: PerRequest(baselines.least_tokens), "fewest KV tokens"),
        "power_of_two": PolicyRow(
            lambda settings: baselines.power_of_two(settings.seed),
            "fewest requests of two drawn at random",
        ),
        "random": PolicyRow(lambda settings: baselines.uniform(settings.seed), "drawn uniformly"),
        "round_robin": PolicyRow(lambda _: baselines.round_robin(), "each worker in turn"),
    }
)
