"""What ``evenstep plan`` is asked, and finds: chains, tuned for the arrival rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from loadgen.planner.config import Machine
from loadgen.planner.times import Footing, charged
from router.core.placement.bounds import ResponseBounds, chain_bounds
from router.core.placement.exact import exact_response_s
from router.core.placement.model import Chain, Placement, total_rate
from router.core.placement.tuning import Composition, compose

# Rounds in which servers at the ends are found out; then every server counts as an end.
_ROUNDS = 6


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked.

    Attributes:
        footing: model, lengths, engines, times.
        machines: in the file's order.
        rate: lambda, requests per second.
    """

    footing: Footing
    machines: Sequence[Machine]
    rate: float


@dataclass(frozen=True, slots=True)
class Option:
    """One way to use the servers.

    Attributes:
        reserved_slots: c.
        placement: where blocks lie.
        chains: the fastest first.
        bounds: on the mean response time.
    """

    reserved_slots: int
    placement: Placement
    chains: tuple[Chain, ...]
    bounds: ResponseBounds

    @property
    def unstable_above(self) -> float:
        """Requests per second from which on they pile up."""
        return total_rate(self.chains)

    @property
    def service_s(self) -> float:
        """Mean over requests where all slots are busy."""
        return sum(chain.slots for chain in self.chains) / self.unstable_above


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer.

    Attributes:
        question: what was asked.
        disjoint: chains that share no server, which is what engines can run.
        overlapping: the best where servers may serve several chains.
        exact_s: mean response time of the disjoint ones; None: they have too many states.
    """

    question: Question
    disjoint: Option
    overlapping: Option
    exact_s: float | None

    @property
    def stable(self) -> bool:
        """Whether engines keep up with the arrivals."""
        return self.question.rate < self.disjoint.unstable_above


def planned(question: Question) -> Plan:
    """Find it.

    Raises:
        PlacementError: the servers cannot hold the model and one request.
    """
    found = disjoint(question)
    rates = [chain.service_rate for chain in found.chains]
    slots = [chain.slots for chain in found.chains]
    exact_s = exact_response_s(rates, slots, question.rate)
    return Plan(question, found, _option(question, overlapping=True), exact_s)


def disjoint(question: Question) -> Option:
    """The best chains that share no server: by memory, or else those that sustain the most.

    Raises:
        PlacementError: the servers cannot hold the model and one request.
    """
    found = _option(question, overlapping=False)
    if question.rate < sustained_rate(question, found):
        return found
    boundless = _boundless(question)
    best = max(found, boundless, key=lambda option: sustained_rate(question, option))
    return replace(best, bounds=chain_bounds(best.chains, question.rate))


def most_sustained(question: Question) -> float:
    """Requests per second below which there are chains that are fast enough, whatever is asked.

    Raises:
        PlacementError: the servers cannot hold the model and one request.
    """
    return sustained_rate(question, _boundless(question))


def _boundless(question: Question) -> Option:
    """As many chains as there can be."""
    return _option(replace(question, rate=math.inf), overlapping=False)


def prompt_rate(question: Question, chain: Chain) -> float:
    """Requests per second whose prompts keep the slowest stage busy all the time."""
    return 1 / max(
        blocks * question.footing.prompt_s(question.machines[server])
        for server, blocks in zip(chain.servers, chain.blocks, strict=True)
    )


def sustained_rate(question: Question, option: Option) -> float:
    """Requests per second of all chains, each by its slots or its prompts, whichever is less."""
    return sum(
        min(chain.slots * chain.service_rate, prompt_rate(question, chain))
        for chain in option.chains
    )


def _option(question: Question, overlapping: bool) -> Option:
    """Compose, each time with the ends of before charged, until no other server is an end."""
    free_ends = question.footing.model.end_bytes(True, True) == 0
    firsts: set[int] = set()
    lasts: set[int] = set()
    for _ in range(_ROUNDS):
        found = _composed(question, firsts, lasts, overlapping)
        first, last = _ends(found.placement)
        if free_ends or (first <= firsts and last <= lasts):
            break
        firsts |= first
        lasts |= last
    else:
        every = set(range(len(question.machines)))
        found = _composed(question, every, every, overlapping)
    chains = found.overlapping if overlapping else found.disjoint
    fastest_first = tuple(sorted(chains, key=lambda chain: chain.service_s))
    return Option(found.reserved_slots, found.placement, fastest_first, found.bounds)


def _composed(
    question: Question, firsts: set[int], lasts: set[int], overlapping: bool
) -> Composition:
    footing = question.footing
    servers = charged(footing, question.machines, firsts, lasts)
    return compose(
        footing.placed_model(max(server.memory_bytes for server in servers)),
        servers,
        question.rate,
        footing.engine.load,
        overlapping=overlapping,
    )


def _ends(placement: Placement) -> tuple[set[int], set[int]]:
    """Servers that hold the first block, and those that hold the last one."""
    last = placement.model.blocks - 1
    return (
        {server for server, held in enumerate(placement.held) if 0 in held},
        {server for server, held in enumerate(placement.held) if last in held},
    )
