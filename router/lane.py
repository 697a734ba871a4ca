"""A group's way through the router: who waits, who decides, and the settings of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from router.decider import Decider
from router.errors import EvenstepError, NoWorkerError
from router.group import Group
from router.pool import Pool
from router.retry import RetryBudget
from router.stats import GroupStats
from router.types import Dispatch, WorkerSpec


@dataclass(frozen=True, slots=True)
class Waiter:
    """Who waits for a worker; ``since_s`` is its arrival, or when it came from another worker."""

    worker: asyncio.Future[WorkerSpec]
    since_s: float

    def refuse(self, error: EvenstepError) -> None:
        """There will be no worker; no-op if there is one already, or the client has left."""
        if not self.worker.done():
            self.worker.set_exception(error)


@dataclass(slots=True)
class Lane:
    """A group's decider, and those who wait for its answers.

    ``deserted_s`` is since when no worker takes requests, None while one does, or is only paused;
    ``budget`` is for answers that are asked for anew.
    """

    decider: Decider
    deserted_s: float | None
    budget: RetryBudget
    waiters: dict[str, Waiter] = field(default_factory=dict)
    timer: asyncio.TimerHandle | asyncio.Handle | None = None
    hurried: bool = False

    @property
    def group(self) -> Group:
        """Whose requests they are."""
        return self.decider.group

    @property
    def pool(self) -> Pool:
        """Their waiting requests."""
        return self.decider.pool

    @property
    def stats(self) -> GroupStats:
        """What has come of them."""
        return self.decider.stats

    def note_desertion(self, now_s: float) -> None:
        """A worker has come or gone."""
        if self.group.serving or self.group.paused:
            self.deserted_s = None
        elif self.deserted_s is None:
            self.deserted_s = now_s

    def desertion(self) -> NoWorkerError:
        """What requests are told while nobody serves them."""
        workers = self.group.workers.items()
        states = ", ".join(f"{i}: {w.down_reason or 'draining'}" for i, w in workers)
        return NoWorkerError(
            f"no worker of group {self.group.name!r} is up ({states or 'all have been removed'})"
        )


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """Settings of the loop.

    Attributes:
        pool_limit: requests that may wait, per group.
        patience_s: a request that waited longer enters at the next free slot.
        queue_timeout_s: a request that waited longer is given up; one that came back from a
            failing worker has as long again.
        snapshot_stale_s: snapshots older than this no longer count.
        overcommit: requests that may queue in an engine before a slot is free; None: as many as
            its slot bubble asks for.
        retry_share: for each request, so many answers may be asked for anew elsewhere.
        retry_min_per_s: and so many in a second at any rate.
    """

    dispatch: Dispatch = Dispatch.POOL
    pool_limit: int = 1024
    patience_s: float = 5.0
    queue_timeout_s: float = 60.0
    snapshot_stale_s: float = 3.0
    overcommit: int | None = 0
    retry_share: float = 0.2
    retry_min_per_s: float = 10.0
