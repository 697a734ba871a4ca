import asyncio
from collections.abc import Callable, Set
from typing import NamedTuple, Protocol

from router.core.events import RelayEvent
from router.core.forecast.look_ahead import LookAhead
from router.core.policies.policy_protocol import Policy
from router.core.stats import TokenStats
from router.core.targets import Verdict
from router.core.types import Outcome, Request, WorkerSpec

# Gets the worker of a request that waits.
Waiter = asyncio.Future[WorkerSpec]
# A request that waits again, under a new id.
Again = tuple[Request, Waiter]


class Deciding(NamedTuple):
    """Makes what decides in a group, once for each; ``fallback``: in rounds that the policy failed.

    Without a look-ahead, loads count as they are.
    """

    policy: Callable[[], Policy]
    fallback: Callable[[], Policy]
    look_ahead: Callable[[], LookAhead | None] = lambda: None


class DispatchPort(Protocol):
    """The dispatcher, as requests see it that one worker serves."""

    def submit(self, request: Request) -> Waiter:
        """Queue a request; it gets a worker, or a NoWorker-, QueueTimeout- or DisplacedError.

        Raises:
            NoWorkerError: the group has had no live worker for a second.
            PoolFullError: its pool is full.
        """

    def give_back(self, request: Request, *failed_by: str) -> Again:
        """Queue a request before all others; the group avoids the workers that failed it."""

    def may_ask_elsewhere(self, request: Request, asked: Set[str]) -> bool:
        """Take a retry from its group's budget; false without one, or another worker."""

    def began(
        self, request: Request, worker_id: str, now_s: float, *, good: bool = True
    ) -> TokenStats:
        """An answer, or an error, now begins; returns the group's token counters."""

    def apply(self, event: RelayEvent) -> None: ...

    def end(self, request: Request, outcome: Outcome) -> None:
        """End a request that waits or is at a worker; no-op if it has ended."""

    def judged(self, group: str, verdict: Verdict) -> None:
        """Count whether a request met its targets, at the group that served it."""

    def energy_j(self, request: Request) -> float | None: ...
