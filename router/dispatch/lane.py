"""A group's lane: its waiting requests, its decider and its settings."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from router.core.errors import EvenstepError, NoWorkerError
from router.core.queue.pool import Pool
from router.core.queue.retry import RetryBudget
from router.core.rounds.decider import Decider
from router.core.state.group import Group
from router.core.stats import GroupStats
from router.core.types import Dispatch, WorkerSpec


@dataclass(frozen=True, slots=True)
class Waiter:
    """A waiting request's future; ``since_s``: its arrival, or its return from another worker."""

    worker: asyncio.Future[WorkerSpec]
    since_s: float

    def refuse(self, error: EvenstepError) -> None:
        """Fail the future; no-op if it has a worker already, or the client has left."""
        if not self.worker.done():
            self.worker.set_exception(error)


@dataclass(slots=True)
class Lane:
    """A group's decider, and the futures of its waiting requests.

    Attributes:
        deserted_s: time since which no worker serves the group; None while one does, or is only
            paused.
    """

    decider: Decider
    deserted_s: float | None
    budget: RetryBudget
    waiters: dict[str, Waiter] = field(default_factory=dict)
    timer: asyncio.TimerHandle | asyncio.Handle | None = None
    hurried: bool = False

    @property
    def group(self) -> Group:
        return self.decider.group

    @property
    def pool(self) -> Pool:
        return self.decider.pool

    @property
    def stats(self) -> GroupStats:
        return self.decider.stats

    def note_desertion(self, now_s: float) -> None:
        if self.group.serving or self.group.paused:
            self.deserted_s = None
        elif self.deserted_s is None:
            self.deserted_s = now_s

    def desertion(self) -> NoWorkerError:
        workers = self.group.workers.items()
        states = ", ".join(f"{i}: {w.down_reason or 'draining'}" for i, w in workers)
        return NoWorkerError(
            f"no worker of group {self.group.name!r} is up ({states or 'all have been removed'})"
        )


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """Settings of the loop.

    Attributes:
        patience_s: wait after which a request takes the next free slot.
        queue_timeout_s: wait after which a request fails; it starts again when a worker fails the
            request.
        snapshot_stale_s: age from which a snapshot no longer counts.
        overcommit: number of requests that may queue in an engine; None: as its slot bubble
            requires.
        retry_share: retries allowed per request.
        retry_min_per_s: retries allowed per second in any case.
    """

    dispatch: Dispatch = Dispatch.POOL
    pool_limit: int = 1024
    patience_s: float = 5.0
    queue_timeout_s: float = 60.0
    snapshot_stale_s: float = 3.0
    overcommit: int | None = 0
    retry_share: float = 0.2
    retry_min_per_s: float = 10.0
