"""The plan of ``evenstep plan``: chains, tuned for the arrival rate."""

import math
from dataclasses import dataclass, replace

from loadgen.planner.question import Question
from router.core.placement.bounds import ResponseBounds, chain_bounds
from router.core.placement.exact_response import exact_response_s
from router.core.placement.model import Chain, Placement, total_rate
from router.core.placement.tuning import Composition, compose

# Rounds for finding the servers at the ends; after them every server counts as an end.
_ROUNDS = 6


@dataclass(frozen=True, slots=True)
class Option:
    """One way to use the servers; ``reserved_slots`` is c."""

    reserved_slots: int
    placement: Placement
    chains: tuple[Chain, ...]
    bounds: ResponseBounds

    @property
    def unstable_above(self) -> float:
        """Requests per second from which on the queue grows without bound."""
        return total_rate(self.chains)

    @property
    def service_s(self) -> float:
        """Mean service time over requests while all slots are busy."""
        return sum(chain.slots for chain in self.chains) / self.unstable_above


@dataclass(frozen=True, slots=True)
class Plan:
    """Result of the planner."""

    question: Question
    disjoint: Option  # chains that share no server; engines can run these
    overlapping: Option  # the best option if servers may serve several chains
    exact_s: float | None  # mean response time of the disjoint chains; None: too many states

    @property
    def stable(self) -> bool:
        return self.question.rate < self.disjoint.unstable_above


def planned(question: Question) -> Plan:
    """Plan chains; PlacementError if the servers cannot hold the model and one request."""
    found = disjoint(question)
    rates = [chain.service_rate for chain in found.chains]
    slots = [chain.slots for chain in found.chains]
    exact_s = exact_response_s(rates, slots, question.rate)
    return Plan(question, found, _option(question, overlapping=True), exact_s)


def disjoint(question: Question) -> Option:
    """The best chains that share no server: by memory, else those that sustain the most.

    PlacementError as in ``planned``.
    """
    found = _option(question, overlapping=False)
    if question.rate < question.sustained_rate(found.chains):
        return found
    options = (found, boundless(question))
    best = max(options, key=lambda option: question.sustained_rate(option.chains))
    return replace(best, bounds=chain_bounds(best.chains, question.rate))


def boundless(question: Question) -> Option:
    """The disjoint chains that sustain the most by memory; PlacementError as in ``planned``."""
    return _option(replace(question, rate=math.inf), overlapping=False)


def _option(question: Question, overlapping: bool) -> Option:
    """Compose chains; repeat with all earlier ends charged until no other server is an end."""
    free_ends = question.model.end_bytes(True, True) == 0
    firsts: set[int] = set()
    lasts: set[int] = set()
    for _ in range(_ROUNDS):
        found = _composed(question, firsts, lasts, overlapping)
        held, end = found.placement.held, found.placement.model.blocks - 1
        first = {server for server, blocks in enumerate(held) if 0 in blocks}
        last = {server for server, blocks in enumerate(held) if end in blocks}
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
    """Embeddings and output layer take memory where the ends may lie."""
    servers = []
    for index, machine in enumerate(question.machines):
        ends_bytes = question.model.end_bytes(index in firsts, index in lasts)
        left_bytes = max(0, question.usable_bytes(machine) - ends_bytes)
        servers.append(question.server(machine, left_bytes))
    return compose(
        question.placed_model(max(server.memory_bytes for server in servers)),
        servers,
        question.rate,
        question.engine.load,
        overlapping=overlapping,
    )
