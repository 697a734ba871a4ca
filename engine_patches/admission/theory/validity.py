"""Validity of given thresholds: (11), (12) and (16) of arXiv 2504.11320; see ``thresholds``."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine_patches.admission.theory.fluid import Flow
from engine_patches.admission.theory.thresholds import (
    Condition,
    Segment,
    Thresholds,
    least_nested,
    least_wait,
    nested_conditions,
    wait_conditions,
)
from router.core.step_time import StepTime


@dataclass(frozen=True, slots=True)
class Validity:
    """``nearest``: least valid thresholds, none below the given ones."""

    thresholds: Thresholds
    conditions: tuple[Condition, ...]
    nearest: Thresholds | None

    @property
    def missed(self) -> list[Condition]:
        """The violated conditions, else those on the edge."""
        missed = [condition for condition in self.conditions if not condition.holds]
        return [condition for condition in missed if not condition.edge] or missed

    @property
    def on_edge(self) -> bool:
        """Queues grow without bound, though slowly; no condition is violated."""
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


def wait_validity(thresholds: Sequence[int], flows: Sequence[Flow], cost: StepTime) -> Validity:
    """Evaluate (11), for as many thresholds as types."""
    given = tuple(thresholds)
    conditions = tuple(wait_conditions(given, flows, cost))
    return Validity(given, conditions, least_wait(flows, cost, given))


def nested_validity(
    thresholds: Sequence[int], segments: Sequence[Segment], cost: StepTime
) -> Validity:
    """Evaluate (12) or (16), for as many thresholds as segments."""
    given = tuple(thresholds)
    conditions = tuple(nested_conditions(given, segments, cost))
    return Validity(given, conditions, least_nested(segments, cost, given))
