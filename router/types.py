"""Values and protocols that every part shares: requests, workers, snapshots, policies.

Standard library, and msgspec for what travels as bytes. Loads and lengths are in KV tokens, times
in seconds (suffix ``_s``); a time is on whatever clock the caller uses, and only differences of one
clock are ever taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import msgspec

if TYPE_CHECKING:
    from router.forecast import Outlook

SCHEMA_VERSION = 1
DEFAULT_SLOTS = 256

Role = Literal["both", "prefill", "decode"]


class StateSource(Enum):
    """Where a worker's state is known from, the best first."""

    SNAPSHOTS = "snapshots"
    METRICS = "metrics"
    OWN = "own"


class Dispatch(Enum):
    """When a request leaves the router: as soon as a slot is free, or at once on arrival."""

    POOL = "pool"
    INSTANT = "instant"


class PoolState(Enum):
    """Whether requests of a group wait in the router; its imbalance is reported for both."""

    EMPTY = "empty"
    WAITING = "waiting"


class Phase(Enum):
    """Life of a request in the router; one that is not split is ready when it arrives."""

    ARRIVED = "arrived"
    PREFILLING = "prefilling"
    READY = "ready"
    DECODING = "decoding"
    ENDED = "ended"


class Outcome(Enum):
    """How a request ended."""

    COMPLETED = "completed"
    ABORTED = "aborted"
    FAILED = "failed"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class Request:
    """What the router knows of a request: never its output length.

    Attributes:
        id: the router's own token, unique per attempt, found again inside engine request ids.
        group: the group of workers (one model, one barrier) that may serve it.
        prompt_tokens: exact for token-id prompts and those that are computed, else an estimate.
        slots: engine requests that it becomes (``n`` times the number of prompts).
        max_tokens: the client's cap on the output, if any.
        priority: lower goes first, as in vLLM.
        arrival_s: when it reached the router.
        text_bytes: of the text that its prompts are and nothing else; 0 where it says nothing of
            their tokens.
        exact: ``prompt_tokens`` is no estimate.
    """

    id: str
    group: str
    prompt_tokens: int
    slots: int = 1
    max_tokens: int | None = None
    priority: int = 0
    arrival_s: float = 0.0
    text_bytes: int = 0
    exact: bool = False

    @property
    def load_tokens(self) -> int:
        """KV tokens that it brings to a worker when it enters (one prompt per engine request)."""
        return self.prompt_tokens * self.slots

    def again(self) -> Request:
        """The same for another attempt: ``es-…``, then ``es-…r1``, ``es-…r2`` (r is no digit)."""
        first, _, attempt = self.id.partition("r")
        return replace(self, id=f"{first}r{int(attempt or 0) + 1}")


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker: a data-parallel rank behind an engine's HTTP server.

    Attributes:
        id: unique name, by default URL plus rank.
        url: base URL of the engine.
        group: barrier domain and model.
        rank: sent as ``X-data-parallel-rank`` when several ranks share one URL.
        slots: requests that run at once; None: what snapshots say, else ``DEFAULT_SLOTS``.
        role: ``prefill`` computes prompts for the others of its group; the rest serve answers.
        snapshots: ZMQ endpoint of the state stream, None where the engine has no plug-in.
        server_key: the engine's public CURVE key, where its stream is secured.
        kv_bootstrap: URL of a prefill engine's bootstrap server, for Mooncake's connector.
    """

    id: str
    url: str
    group: str = "default"
    role: Role = "both"
    rank: int | None = None
    slots: int | None = None
    snapshots: str | None = None
    server_key: str | None = None
    kv_bootstrap: str | None = None

    @property
    def stage(self) -> str:
        """The group in which the router counts it: prefill workers have one of their own."""
        return prefill_stage(self.group) if self.role == "prefill" else self.group


def prefill_stage(group: str) -> str:
    """What the prefill workers of a group are called together."""
    return f"{group}/prefill"


# --- what a policy sees and says ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A live worker as a policy sees it.

    Attributes:
        load_tokens: resident KV tokens, dispatches that no snapshot has shown yet included.
        requests: engine requests running, queued or on their way.
        capacity: engine requests that it may receive in this round.
        waiting: those of ``requests`` that are queued in the engine.
        kv_usage: fraction of its KV memory in use; 0 where the engine does not tell.
        admissible_tokens: KV tokens that requests may bring to it in this round, the first one of
            an idle worker aside; None where the engine does not tell.
    """

    id: str
    load_tokens: int
    requests: int
    capacity: int
    waiting: int = 0
    kv_usage: float = 0.0
    admissible_tokens: int | None = None


class Assignment(NamedTuple):
    """One request to one worker; a tuple, since a round may make hundreds in a millisecond."""

    request_id: str
    worker_id: str


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


# --- snapshots (schema 1) -------------------------------------------------------------------------


class RunningRequest(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One running engine request in a snapshot; ``id`` is the engine's own."""

    id: str
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int = 0
    prefill_left: int = 0
    end_probability: float | None = None


class KvGroup(msgspec.Struct, frozen=True, gc=False):
    """Block pool of one KV group; hybrid models have several."""

    block_size: int
    blocks_used: int
    blocks_total: int


class Snapshot(msgspec.Struct, frozen=True, gc=False):
    """State of one worker after one step, schema 1.

    A ``full`` snapshot lists all running requests. A ``delta`` lists those that are new or did
    not grow by exactly one token; every other running request grew by one.

    Attributes:
        epoch: new at every start of the engine.
        sequence: grows by one per message of an epoch; a full one repeats the latest.
        step: the barrier step that has just ended; ranks of a barrier count alike.
        time_s: wall clock (seconds since 1970) at the end of the step.
        step_s: how long the step took.
    """

    kind: Literal["full", "delta"]
    group: str
    worker: str
    rank: int
    epoch: str
    sequence: int
    step: int
    time_s: float
    step_s: float
    version: int = SCHEMA_VERSION
    running: tuple[RunningRequest, ...] = ()
    finished: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    waiting: int = 0
    waiting_tokens: int = 0
    slots: int = DEFAULT_SLOTS
    kv_groups: tuple[KvGroup, ...] = ()
    admissible_kv_tokens: int | None = None
    scheduled_prefill_tokens: int = 0
    scheduled_decode_tokens: int = 0
    preemptions_total: int = 0
    power_w: float | None = None
    energy_j: float | None = None


@dataclass(frozen=True, slots=True)
class Gauges:
    """A worker as its engine's own gauges show it, which may be many seconds late.

    Attributes:
        running: engine requests that run, anybody's.
        waiting: those that are queued.
        kv_usage: fraction of the KV memory in use.
        kv_tokens: tokens that fit into it, 0 where that is not told.
    """

    running: int
    waiting: int = 0
    kv_usage: float = 0.0
    kv_tokens: int = 0

    @property
    def load_tokens(self) -> int:
        """KV tokens in use."""
        return round(self.kv_usage * self.kv_tokens)


# --- events of the cluster state machine ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerUp:
    """A worker may be used: it joined, or answered its health check again."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class WorkerDown:
    """A worker may not be used any more, if only since one request's connection broke."""

    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """A worker's engine has failed its health checks: what it kept for others is gone."""

    worker_id: str


class SnapshotReceived(msgspec.Struct, frozen=True, gc=False):
    """A snapshot arrived from a worker."""

    worker_id: str
    snapshot: Snapshot
    received_s: float


@dataclass(frozen=True, slots=True)
class GaugesReceived:
    """The gauges of a worker without fresh snapshots were read; None: they could not be."""

    worker_id: str
    gauges: Gauges | None
    received_s: float


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request came, and waits for a worker."""

    request: Request


@dataclass(frozen=True, slots=True)
class Dispatched:
    """A request that waited was sent to a worker."""

    request_id: str
    worker_id: str


@dataclass(frozen=True, slots=True)
class Progressed:
    """A request's stream has shown this many output tokens so far (workers without snapshots)."""

    request_id: str
    generated_tokens: int


@dataclass(frozen=True, slots=True)
class PromptCounted:
    """An engine's answer says how many tokens the prompt of a one-slot request has."""

    request_id: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prompt is computed: its request waits, as ``ready``, for a decode worker.

    ``kept_until_s`` is until when the prefill worker keeps its KV, None if it keeps none.
    """

    request_id: str
    ready: Request
    kept_until_s: float | None


@dataclass(frozen=True, slots=True)
class Fetched:
    """A decode worker has the KV of a request's prompt: the prefill worker need not keep it."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Returned:
    """A request is to be assigned anew, as ``again``: it had not had its first byte."""

    request_id: str
    again: Request


@dataclass(frozen=True, slots=True)
class Ended:
    """A request ended, while it waited or after."""

    request_id: str
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class FeedStale:
    """A worker's snapshots have stopped; until the next one the router's own counts hold."""

    worker_id: str


RequestEvent = Dispatched | Progressed | PromptCounted | Prefilled | Fetched | Returned | Ended
WorkerEvent = WorkerUp | WorkerDown | EngineFailed | SnapshotReceived | GaugesReceived | FeedStale
Event = Arrived | WorkerEvent | RequestEvent
