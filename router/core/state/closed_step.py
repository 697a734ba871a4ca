"""Details of each step by worker, for observers that need more than sums."""

from collections.abc import Mapping

import msgspec


class StepPart(msgspec.Struct, frozen=True, gc=False):
    """One worker in a closed step.

    The load is as in the step's imbalance: 0 for an idle worker; for a busy one that did not make
    this step, the load after its last step. ``queued``, ``power_w``: at its last report.
    """

    load_tokens: int
    running: int
    queued: int
    power_w: float | None
    prompt_tokens: int = 0


class ClosedStep(msgspec.Struct, frozen=True, gc=False):
    """A closed step of a group."""

    step: int  # without a barrier, the number of the furthest rank
    step_s: float  # in the engine's seconds
    parts: Mapping[str, StepPart]  # by worker, without those that are down or silent
    together: bool  # true if all busy workers made it together
    # Modelled by the group's step time, summed over workers; None: unknown, or no barrier.
    waiting_s: float | None
    preemptions: int  # since the step before
    waited_s: float | None = None  # measured, summed over workers; None: not all engines measure it
    output_tokens: int = 0  # that requests gained
