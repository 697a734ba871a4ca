"""Whether thresholds that somebody gives are valid for the requests that he expects.

(11), (12) and (16) of arXiv 2504.11320; see ``thresholds``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine_patches.admission.fluid import Flow, StepCost
from engine_patches.admission.thresholds import (
    Condition,
    Segment,
    Thresholds,
    least_nested,
    least_wait,
    nested_conditions,
    wait_conditions,
)


@dataclass(frozen=True, slots=True)
class Validity:
    """Of some thresholds.

    Attributes:
        thresholds: as given.
        conditions: of the paper.
        nearest: the least valid ones that are nowhere below; None: there are none.
    """

    thresholds: Thresholds
    conditions: tuple[Condition, ...]
    nearest: Thresholds | None

    @property
    def missed(self) -> list[Condition]:
        """Those that do not hold; if some are broken, they alone, else those on the edge."""
        missed = [condition for condition in self.conditions if not condition.holds]
        return [condition for condition in missed if not condition.edge] or missed

    @property
    def on_edge(self) -> bool:
        """Queues grow without bound, though slowly; nothing is broken."""
        return bool(self.missed) and all(condition.edge for condition in self.missed)

    def __str__(self) -> str:
        verdict = "on the edge, where queues have no bound" if self.on_edge else "not valid"
        missed = "; ".join(map(str, self.missed))
        nearest = (
            "no greater ones are valid: the engine cannot sustain these rates"
            if self.nearest is None
            else f"the nearest that are valid: {list(self.nearest)}"
        )
        return f"thresholds {list(self.thresholds)} are {verdict}: {missed}; {nearest}"


def wait_validity(thresholds: Sequence[int], flows: Sequence[Flow], cost: StepCost) -> Validity:
    """(11), for as many thresholds as types."""
    given = tuple(thresholds)
    conditions = tuple(wait_conditions(given, flows, cost))
    return Validity(given, conditions, least_wait(flows, cost, given))


def nested_validity(
    thresholds: Sequence[int], segments: Sequence[Segment], cost: StepCost
) -> Validity:
    """(12) or (16), for as many thresholds as segments."""
    given = tuple(thresholds)
    conditions = tuple(nested_conditions(given, segments, cost))
    return Validity(given, conditions, least_nested(segments, cost, given))
