"""What every policy is: the one protocol that ``rounds`` relies on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from router.types import Assignment, Request, WorkerView

if TYPE_CHECKING:
    from router.forecast import Outlook


class Policy(Protocol):
    """Assigns a pool of waiting requests to workers, jointly."""

    def assign(
        self,
        waiting: Sequence[Request],
        workers: Sequence[WorkerView],
        outlook: Outlook | None = None,
    ) -> Sequence[Assignment]:
        """Choose who goes where in this round.

        Args:
            waiting: candidates, oldest first, all of one priority.
            workers: the live workers of one group, in a fixed order.
            outlook: predicted loads of these workers; None: nothing is known but the views.

        Returns:
            Assignments in the order of their choosing. Each request at most once; each to a
            worker with capacity left (a request of several slots may overrun the last one); none
            held back while capacity is left. ``rounds`` checks all three.
        """
        ...
