"""Events: all that changes the cluster's state.

Times are in seconds (``_s``) of the caller's clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from router.core.types import Outcome, Request, Snapshot

if TYPE_CHECKING:
    from router.core.state.foreign_load import Gauges


class _Event(msgspec.Struct, frozen=True, gc=False):
    pass


class WorkerUp(_Event, frozen=True):
    """A worker joined, or passed its health check again."""

    worker_id: str


class WorkerDown(_Event, frozen=True):
    """A worker must not be used, perhaps only because one request's connection broke."""

    worker_id: str
    reason: str


class EngineFailed(_Event, frozen=True):
    """A worker's engine failed its health checks: KV that it kept for others is gone."""

    worker_id: str


class SnapshotReceived(_Event, frozen=True):
    """A snapshot arrived."""

    worker_id: str
    snapshot: Snapshot
    received_s: float


class CacheTold(_Event, frozen=True):
    """KV events arrived: ``cache`` tells only of the blocks that a worker has cached."""

    worker_id: str
    cache: Snapshot
    received_s: float


class GaugesReceived(_Event, frozen=True):
    """Gauges of a worker without fresh snapshots; None: they could not be read."""

    worker_id: str
    gauges: Gauges | None
    received_s: float


class PowerTold(_Event, frozen=True):
    """An agent reported a worker's power, and joules since the agent's start; None: unknown."""

    worker_id: str
    power_w: float | None
    energy_j: float | None
    received_s: float


class Arrived(_Event, frozen=True):
    """A request waits for a worker."""

    request: Request


class Dispatched(_Event, frozen=True):
    """A waiting request was sent to a worker; ``time_s`` None (here and below): unknown."""

    request_id: str
    worker_id: str
    time_s: float | None = None


class Began(_Event, frozen=True):
    """The first byte of an answer goes to its client; not ``good``: an error, no measure."""

    request_id: str
    worker_id: str
    time_s: float
    good: bool = True


class Carried(_Event, frozen=True):
    """A gateway takes a sent request to its worker, and will not tell when its answer begins."""

    request_id: str
    time_s: float


class Progressed(_Event, frozen=True):
    """Output tokens that a request has streamed so far (workers without snapshots)."""

    request_id: str
    generated_tokens: int


class PromptCounted(_Event, frozen=True):
    """An engine's answer reported the prompt tokens of a one-slot request.

    ``output_tokens`` counts those of a complete answer; 0: unknown.
    """

    request_id: str
    prompt_tokens: int
    output_tokens: int = 0


class Prefilled(_Event, frozen=True):
    """A prompt is computed and ``ready`` waits; ``kept_until_s`` is the lease on its KV, if any."""

    request_id: str
    ready: Request
    kept_until_s: float | None
    time_s: float | None = None


class Fetched(_Event, frozen=True):
    """A decode worker fetched a request's KV: the prefill worker may drop it."""

    request_id: str


class Returned(_Event, frozen=True):
    """A request without a first byte waits for a worker again, as ``again``."""

    request_id: str
    again: Request
    time_s: float | None = None


class Ended(_Event, frozen=True):
    """A request ended, waiting or dispatched."""

    request_id: str
    outcome: Outcome
    time_s: float | None = None


class Succeeded(_Event, frozen=True):
    """A worker answered a request that streams nothing to a client, or skips the pool."""

    request_id: str
    worker_id: str
    time_s: float


class Failed(_Event, frozen=True):
    """A worker failed a request; ``suspect``: another one failed it before."""

    request_id: str
    worker_id: str
    time_s: float
    suspect: bool = False


class Refused(_Event, frozen=True):
    """A worker answered a request with an error, whatever its cause."""

    request_id: str
    worker_id: str


class RestRequested(_Event, frozen=True):
    """A worker asked for some seconds without requests."""

    worker_id: str
    time_s: float
    seconds: float


class FeedStale(_Event, frozen=True):
    """A worker's snapshots stopped; the router's own counts hold until the next one."""

    worker_id: str


RequestEvent = (
    Dispatched
    | Began
    | Carried
    | Progressed
    | PromptCounted
    | Prefilled
    | Fetched
    | Returned
    | Ended
)
AnswerEvent = Succeeded | Failed | Refused | RestRequested
RelayEvent = AnswerEvent | Carried | Progressed | PromptCounted
StateEvent = SnapshotReceived | CacheTold | GaugesReceived | FeedStale | PowerTold
WorkerEvent = WorkerUp | WorkerDown | EngineFailed | StateEvent
Event = Arrived | WorkerEvent | AnswerEvent | RequestEvent
