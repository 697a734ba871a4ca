"""The prompt budget of one engine: which one is in force, and steps that keep it.

Without a barrier it is the least that routers have set. Behind one, the ranks agree after the same
step on the least that any of them was told, or on none if any was told none. So a message that is
late or lost on the way to one rank gives no rank another budget than the others have.
"""

import time
from collections.abc import Callable
from typing import Protocol

from engine_patches.plugin.harmless import harmless
from engine_patches.stream.prompt_leases import (
    AGREE_STEPS,
    NO_BUDGET,
    PromptLeases,
    packed,
    unpacked,
)
from router.core.step_time import StepBudget

_ends_bound = harmless("the prompt budget ends here; the engine goes on without it")


class BoundedSteps(Protocol):
    """As ``compat_prompts.PromptTokens``."""

    def bound(self, tokens: int) -> None: ...

    def hold(self) -> None: ...

    def free(self) -> None: ...


class PromptBound:
    """Bounds the prompt tokens of an engine's steps.

    Args:
        steps: the engine's.
        lockstep: whether the ranks of a group agree, by ``stepped``.
        clock: wall clock, as of the snapshots.

    Attributes:
        leases: budgets of routers.
    """

    def __init__(
        self, steps: BoundedSteps, *, lockstep: bool, clock: Callable[[], float] = time.time
    ) -> None:
        self.failed = False
        self.leases = PromptLeases()
        self._budget = NO_BUDGET
        self._number = 0  # of the last step
        self._steps = steps
        self._lockstep = lockstep
        self._clock = clock

    @property
    def tokens(self) -> int:
        """The budget in force, of steps with prompts; 0: none."""
        return 0 if self.failed else self._budget.tokens

    @property
    def holds(self) -> bool:
        """Whether the next step computes no prompts."""
        return self.tokens > 0 and not self._budget.at(self._number)

    def stepped(self, number: int, least: Callable[[int], int]) -> None:
        """Note the end of a group's step; see ``watch_group_steps``.

        An engine that failed takes part: otherwise the others would wait for it.
        """
        self._number = number
        if not number or number % AGREE_STEPS == 1:
            self._budget = unpacked(least(packed(self._told())))

    @_ends_bound
    def open(self) -> None:
        """Bound the step that is scheduled next."""
        if not self._lockstep:
            self._budget = self._told()
            self._number += 1
        if self.holds:
            self._steps.hold()
        elif self.tokens:
            self._steps.bound(self.tokens)

    def close(self) -> None:
        """Restore vLLM's own bounds after the step is scheduled, or could not be."""
        self._steps.free()

    def _told(self) -> StepBudget:
        return NO_BUDGET if self.failed else self.leases.least(self._clock())
