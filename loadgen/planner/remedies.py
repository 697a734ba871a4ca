"""Remedies for an infeasible plan: fewer requests, shorter ones, more servers."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from loadgen.planner.plan_file import Machine
from loadgen.planner.planned import boundless, disjoint
from loadgen.planner.question import Question
from router.core.errors import PlacementError

# With more servers only the rate is examined, since each trial takes long.
_MOST_SERVERS = 32
_MOST_MORE = 64
# Steps in which lengths are reduced.
_SHARES = 64


def remedies(question: Question, *, fits: bool) -> list[str]:
    """Sentences, each a sufficient remedy; ``fits``: the servers can hold the model."""
    found = []
    if fits:
        most = question.sustained_rate(boundless(question).chains)
        found.append(f"a rate below {most:.4g} requests/s")
    if len(question.machines) <= _MOST_SERVERS:
        found += _shorter(question)
        found += _more_servers(question)
    return found


def feasible(question: Question) -> bool:
    """Whether engines hold the model and keep up with the arrivals."""
    try:
        return question.rate < question.sustained_rate(disjoint(question).chains)
    except PlacementError:
        return False


def _shorter(question: Question) -> Iterator[str]:
    if not feasible(_with_share(question, 1)):
        return
    # Feasibility grows with the cut, so search for the least one.
    cut = _least(lambda cut: feasible(_with_share(question, _SHARES - cut)), _SHARES - 1)
    if cut is not None:
        lengths = _with_share(question, _SHARES - cut).lengths
        yield (
            f"requests {cut / _SHARES:.0%} shorter, of {lengths.input_tokens:,.0f} + "
            f"{lengths.output_tokens:,.0f} tokens, {lengths.slot_tokens:,.0f} to a slot"
        )


def _with_share(question: Question, share: int) -> Question:
    return replace(question, lengths=question.lengths.scaled(share / _SHARES))


def _more_servers(question: Question) -> Iterator[str]:
    for machine in {each.kind: each for each in question.machines}.values():

        def enough(more: int, like: Machine = machine) -> bool:
            added = [replace(like, name=f"{like.kind}+{n}") for n in range(more)]
            return feasible(replace(question, machines=[*question.machines, *added]))

        more = _least(enough, _MOST_MORE)
        if more is not None:
            yield f"{more} more like {machine.kind}"


def _least(enough: Callable[[int], bool], most: int) -> int | None:
    """Least sufficient number from 1 up to ``most``, by doubling and bisection; None: none."""
    low, high = 0, 1
    while not enough(high):
        if high == most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
