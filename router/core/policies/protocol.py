"""The protocol of policies, on which ``rounds`` relies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from router.core.types import Assignment, Request, WorkerView

if TYPE_CHECKING:
    from router.core.forecast.forecast import Outlook


class Policy(Protocol):
    """Assigns a pool of waiting requests to workers, jointly."""

    def assign(
        self,
        waiting: Sequence[Request],
        workers: Sequence[WorkerView],
        outlook: Outlook | None = None,
    ) -> Sequence[Assignment]:
        """Assign requests of one round.

        Args:
            waiting: candidates of one priority, oldest first.
            workers: live workers of one group, in a fixed order.
            outlook: predicted loads of these workers; None: only the views are known.

        Returns:
            Assignments in the order of choice. Each request occurs at most once, on a worker with
            capacity left (a request of several slots may exceed it). None waits while capacity is
            left. ``rounds`` checks all three.
        """
        ...
