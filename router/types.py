"""Values that every part shares: requests, workers, snapshots, events.

Standard library, and msgspec for what travels as bytes or is made for every request. Loads and
lengths are in KV tokens, times in seconds (``_s``) of whatever clock the caller uses: only
differences of one clock are ever taken.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    from router.foreign import Gauges

SCHEMA_VERSION = 1
DEFAULT_SLOTS = 256
ADMISSION_ENDED = "ended"
# Why a worker is down whose operator has stopped its engine for a while, in ``WorkerDown``.
ASLEEP, PAUSED = "its engine is asleep", "its engine is paused"

MOST_RUNNING = 16_384
"""Running requests that a snapshot may list: they are taken in within a tenth of a second."""

MOST_ENDED = 65_536
"""Ids that a snapshot may call finished, and preempted."""

# What a message may say; ``wire`` refuses the rest as it decodes. Sums of these stay exact.
Count = Annotated[int, Meta(ge=0, le=1 << 32)]
Number = Annotated[int, Meta(ge=0, le=1 << 53)]
Amount = Annotated[float, Meta(ge=0, le=1e15)]
Name = Annotated[str, Meta(max_length=1024)]
Share = Annotated[float, Meta(ge=0, le=1)]
Ids = Annotated[tuple[str, ...], Meta(max_length=MOST_ENDED)]

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
    DISPLACED = "displaced"


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
        text_bytes: of the text that its prompts are; 0 where it says nothing of their tokens.
        parts: images and the like beside that text.
        exact: ``prompt_tokens`` is no estimate.
        metered: its client asks how much energy it takes.
        tenant: name of the key that it came with; empty where no keys are asked for.
        queue_timeout_s: how long it may wait in the router; None: as long as the router lets it.
        avoid: ids of workers that have failed it; it goes to others while there are any.
        lacks: ids of workers that do not serve its model; it goes to none of them.
    """

    id: str
    group: str
    prompt_tokens: int
    slots: int = 1
    max_tokens: int | None = None
    priority: int = 0
    arrival_s: float = 0.0
    text_bytes: int = 0
    parts: int = 0
    exact: bool = False
    metered: bool = False
    tenant: str = ""
    queue_timeout_s: float | None = None
    avoid: frozenset[str] = frozenset()
    lacks: frozenset[str] = frozenset()

    @property
    def load_tokens(self) -> int:
        """KV tokens that it brings to a worker when it enters (one prompt per engine request)."""
        return self.prompt_tokens * self.slots

    @property
    def first_id(self) -> str:
        """What it was called before it was given out anew; see ``again``."""
        return self.id.partition("r")[0]

    def again(self, *failed_by: str) -> Request:
        """The same for another attempt: ``es-…``, then ``es-…r1``, ``es-…r2`` (r is no digit)."""
        first, _, attempt = self.id.partition("r")
        attempt_id = f"{first}r{int(attempt or 0) + 1}"
        return replace(self, id=attempt_id, avoid=self.avoid.union(failed_by))


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
        server_key: public CURVE key of the engine, or the agent, whose messages are secured.
        power: ZMQ endpoint of the agent that tells its power; None: only snapshots may.
        kv_bootstrap: URL of a prefill engine's bootstrap server, for Mooncake's connector.
        service_rate: requests per second that each slot completes, as planned; None: not planned.
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
    power: str | None = None
    service_rate: float | None = None

    @property
    def stage(self) -> str:
        """The group in which the router counts it: prefill workers have one of their own."""
        return prefill_stage(self.group) if self.role == "prefill" else self.group


def prefill_stage(group: str) -> str:
    """What the prefill workers of a group are called together."""
    return f"{group}/prefill"


class WorkerView(msgspec.Struct, frozen=True, gc=False):
    """A live worker as a policy sees it.

    Attributes:
        load_tokens: resident KV tokens, dispatches that no snapshot has shown yet included.
        requests: engine requests running, queued or on their way.
        capacity: engine requests that it may receive in this round.
        waiting: those of ``requests`` that are queued in the engine.
        kv_usage: fraction of its KV memory in use; 0 where the engine does not tell.
        admissible_tokens: KV tokens that may be brought to it, if it is not idle; None: not told.
        slots: engine requests that it runs at once.
        service_rate: mu, requests per second that each slot completes; alike where nothing tells.
        rate_error: relative standard error of ``service_rate``; 0 where it is given, not learned.
    """

    id: str
    load_tokens: int
    requests: int
    capacity: int
    waiting: int = 0
    kv_usage: float = 0.0
    admissible_tokens: int | None = None
    slots: int = DEFAULT_SLOTS
    service_rate: float = 1.0
    rate_error: float = 0.0


class Assignment(NamedTuple):
    """One request to one worker; a tuple, since a round may make hundreds in a millisecond."""

    request_id: str
    worker_id: str


class RunningRequest(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One running engine request in a snapshot; ``id`` is the engine's own."""

    id: str
    prompt_tokens: Count
    generated_tokens: Count
    cached_tokens: Count = 0
    prefill_left: Count = 0
    end_probability: Share | None = None


class KvGroup(msgspec.Struct, frozen=True, gc=False):
    """Block pool of one KV group; hybrid models have several."""

    block_size: Count
    blocks_used: Count
    blocks_total: Count


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
        waited_s: for how long of it the rank waited for others; None: its engine times it not.
        admission: its plug-in's policy; ``ADMISSION_ENDED`` after a fault; None: its engine's own.
        waiting_routed: those of ``waiting`` that routers have sent; None: not told.
    """

    kind: Literal["full", "delta"]
    group: Name
    worker: Name
    rank: Count
    epoch: Name
    sequence: Number
    step: Number
    time_s: Amount
    step_s: Amount
    version: int = SCHEMA_VERSION
    running: Annotated[tuple[RunningRequest, ...], Meta(max_length=MOST_RUNNING)] = ()
    finished: Ids = ()
    preempted: Ids = ()
    waiting: Count = 0
    waiting_tokens: Number = 0
    slots: Annotated[int, Meta(ge=0, le=MOST_RUNNING)] = DEFAULT_SLOTS
    kv_groups: Annotated[tuple[KvGroup, ...], Meta(max_length=64)] = ()
    admissible_kv_tokens: Number | None = None
    admission: Name | None = None
    scheduled_prefill_tokens: Count = 0
    scheduled_decode_tokens: Count = 0
    preemptions_total: Number = 0
    waited_s: Amount | None = None
    power_w: Amount | None = None
    energy_j: Amount | None = None
    waiting_routed: Count | None = None


class WorkerUp(msgspec.Struct, frozen=True, gc=False):
    """A worker may be used: it joined, or answered its health check again."""

    worker_id: str


class WorkerDown(msgspec.Struct, frozen=True, gc=False):
    """A worker may not be used any more, if only since one request's connection broke."""

    worker_id: str
    reason: str


class EngineFailed(msgspec.Struct, frozen=True, gc=False):
    """A worker's engine has failed its health checks: what it kept for others is gone."""

    worker_id: str


class SnapshotReceived(msgspec.Struct, frozen=True, gc=False):
    """A snapshot arrived from a worker."""

    worker_id: str
    snapshot: Snapshot
    received_s: float


class GaugesReceived(msgspec.Struct, frozen=True, gc=False):
    """The gauges of a worker without fresh snapshots were read; None: they could not be."""

    worker_id: str
    gauges: Gauges | None
    received_s: float


class PowerTold(msgspec.Struct, frozen=True, gc=False):
    """An agent has told a worker's power, and joules since its start; None: unknown."""

    worker_id: str
    power_w: float | None
    energy_j: float | None
    received_s: float


class Arrived(msgspec.Struct, frozen=True, gc=False):
    """A request came, and waits for a worker."""

    request: Request


class Dispatched(msgspec.Struct, frozen=True, gc=False):
    """A request that waited was sent to a worker; ``time_s`` of these events: None, not told."""

    request_id: str
    worker_id: str
    time_s: float | None = None


class Progressed(msgspec.Struct, frozen=True, gc=False):
    """A request's stream has shown this many output tokens so far (workers without snapshots)."""

    request_id: str
    generated_tokens: int


class PromptCounted(msgspec.Struct, frozen=True, gc=False):
    """An engine's answer says how many tokens the prompt of a one-slot request has.

    ``output_tokens`` are those of the answer where it came as a whole, 0 where it says nothing.
    """

    request_id: str
    prompt_tokens: int
    output_tokens: int = 0


class Prefilled(msgspec.Struct, frozen=True, gc=False):
    """A prompt is computed, its KV kept until then if at all: its request, ``ready``, waits."""

    request_id: str
    ready: Request
    kept_until_s: float | None
    time_s: float | None = None


class Fetched(msgspec.Struct, frozen=True, gc=False):
    """A decode worker has the KV of a request's prompt: the prefill worker need not keep it."""

    request_id: str


class Returned(msgspec.Struct, frozen=True, gc=False):
    """A request is to be assigned anew, as ``again``: it had not had its first byte."""

    request_id: str
    again: Request
    time_s: float | None = None


class Ended(msgspec.Struct, frozen=True, gc=False):
    """A request ended, while it waited or after."""

    request_id: str
    outcome: Outcome
    time_s: float | None = None


class FeedStale(msgspec.Struct, frozen=True, gc=False):
    """A worker's snapshots have stopped; until the next one the router's own counts hold."""

    worker_id: str


RequestEvent = Dispatched | Progressed | PromptCounted | Prefilled | Fetched | Returned | Ended
StateEvent = SnapshotReceived | GaugesReceived | FeedStale | PowerTold
WorkerEvent = WorkerUp | WorkerDown | EngineFailed | StateEvent
Event = Arrived | WorkerEvent | RequestEvent
