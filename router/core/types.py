"""Shared values: requests, workers, snapshots.

They need only the standard library, and msgspec where they travel as bytes or are made per request.
Loads and lengths are in KV tokens. Times are in seconds (``_s``) of the caller's clock; only
differences of one clock are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from router.core.targets import Targets

if TYPE_CHECKING:
    from router.core.kv_blocks import KvBlocks

SCHEMA_VERSION = 1
DEFAULT_SLOTS = 256

# Engine's description of a model at /v1/models.
Card = Mapping[str, Any]

ADMISSION_ENDED = "ended"
# Reasons in ``WorkerDown`` when the operator has suspended the engine for a while.
ASLEEP, PAUSED = "its engine is asleep", "its engine is paused"

MOST_RUNNING = 16_384
"""Most running requests in a snapshot: this many are processed within a tenth of a second."""

FREE_PLACE = 255
"""In ``Snapshot.growths``: no request has this place."""

MOST_ENDED = 65_536
"""Most finished ids in a snapshot, and most preempted ones."""

# Bounds of message fields; ``wire`` rejects others while decoding. Sums of these stay exact.
Count = Annotated[int, Meta(ge=0, le=1 << 32)]
Number = Annotated[int, Meta(ge=0, le=1 << 53)]
Amount = Annotated[float, Meta(ge=0, le=1e15)]
Name = Annotated[str, Meta(max_length=1024)]
Share = Annotated[float, Meta(ge=0, le=1)]
Ids = Annotated[tuple[str, ...], Meta(max_length=MOST_ENDED)]
# A place that a step leaves is free only in the next one.
Place = Annotated[int, Meta(ge=0, lt=2 * MOST_RUNNING)]

Role = Literal["both", "prefill", "decode"]


class StateSource(Enum):
    """Source of a worker's state, the best first."""

    SNAPSHOTS = "snapshots"
    METRICS = "metrics"
    OWN = "own"


class Dispatch(Enum):
    """When a request leaves the router: once a slot is free, or at once on arrival."""

    POOL = "pool"
    INSTANT = "instant"


class PoolState(Enum):
    """Presence of waiting requests; imbalance is reported for both states."""

    EMPTY = "empty"
    WAITING = "waiting"


class Sight(Enum):
    """What a worker's snapshots show of a request that was sent there."""

    HERE = "here"
    """It runs, or may wait; or there are no snapshots."""
    ENDED = "ended"
    LOST = "lost"
    """It was there; its end was not told."""
    UNSEEN = "unseen"


class Outcome(Enum):
    """How a request ended."""

    COMPLETED = "completed"
    ABORTED = "aborted"
    FAILED = "failed"
    EXPIRED = "expired"
    DISPLACED = "displaced"


class Content(msgspec.Struct, frozen=True, gc=False):
    """What a prompt is made of, by ids: equal ids stand for equal leading parts.

    Attributes:
        pieces: of token ids, as ``router.core.prefix.ids`` makes them; empty for text.
        chunks: of text, as ``router.core.prefix.text_chunks`` makes them; empty for token ids.
        sizes: bytes of each chunk, four bytes each, and ``text_chunks.PART_END``.
        session: id of the client's session, instead, where the prompt is not visible.
    """

    pieces: bytes = b""
    chunks: bytes = b""
    sizes: bytes = b""
    session: bytes = b""


@dataclass(frozen=True, slots=True)
class Request:
    """The router's view of a request, without its output length, which is unknown.

    Attributes:
        id: the router's own token, unique per attempt, contained in engine request ids.
        group: group of workers (one model, one barrier) that may serve it.
        prompt_tokens: exact for token-id and computed prompts, else an estimate.
        slots: number of engine requests that it becomes (``n`` times the number of prompts).
        priority: lower goes first, as in vLLM.
        text_bytes: size of its prompts' text; 0 where that does not determine the tokens.
        tenant: name of its key; empty without keys.
        queue_timeout_s: longest wait in the router; None: the router's own limit.
        avoid: ids of workers that failed it; others are preferred while there are any.
        lacks: ids of workers that do not serve its model and must not receive it.
        model: empty: not named.
        adapter: its model, if that is a LoRA adapter; else empty.
        first_id: id of its first attempt.
        content: ids of its only prompt; its session's if that is all there is; None: neither is
            known, or nobody asks.
        computed: whether its prompt's KV only has to be fetched, from a prefill worker.
        targets: how soon its tokens are wanted; None: no matter.
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
    model: str = ""
    adapter: str = ""
    first_id: str = ""
    content: Content | None = None
    computed: bool = False
    targets: Targets | None = None

    def __post_init__(self) -> None:
        if not self.first_id:
            object.__setattr__(self, "first_id", self.id.partition("r")[0])

    @property
    def load_tokens(self) -> int:
        """KV tokens that it adds to a worker on entry."""
        return self.prompt_tokens * self.slots

    def again(self, *failed_by: str) -> Request:
        """The request under a new id: ``es-…``, then ``es-…r1``, ``es-…r2`` (r is no hex digit)."""
        attempt = self.id.partition("r")[2]
        attempt_id = f"{self.first_id}r{int(attempt or 0) + 1}"
        return replace(self, id=attempt_id, avoid=self.avoid.union(failed_by))


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker: a data-parallel rank behind an engine's HTTP server.

    Attributes:
        id: unique; by default URL plus rank.
        group: barrier domain and model.
        rank: sent as ``X-data-parallel-rank`` when several ranks share one URL.
        slots: requests that run at once; None: from snapshots, else ``DEFAULT_SLOTS``.
        role: ``prefill`` computes prompts for the other workers of its group, which answer.
        snapshots: ZMQ endpoint of the state stream; None: the engine has no plug-in.
        server_key: public CURVE key of the engine or agent; None: messages are not secured.
        kv_events: ZMQ endpoint of vLLM's KV events, of an engine without the plug-in.
        kv_replay: ZMQ endpoint that repeats those.
        power: ZMQ endpoint of the agent that reports its power; None: only snapshots may.
        kv_bootstrap: URL of a prefill engine's bootstrap server, for Mooncake's connector.
        service_rate: planned requests per second of each slot; None: not planned.
    """

    id: str
    url: str
    group: str = "default"
    role: Role = "both"
    rank: int | None = None
    slots: int | None = None
    snapshots: str | None = None
    kv_events: str | None = None
    kv_replay: str | None = None
    server_key: str | None = None
    kv_bootstrap: str | None = None
    power: str | None = None
    service_rate: float | None = None

    @property
    def stage(self) -> str:
        """The group that counts it: prefill workers form a group of their own."""
        return prefill_stage(self.group) if self.role == "prefill" else self.group


def prefill_stage(group: str) -> str:
    """Name of the group of a group's prefill workers."""
    return f"{group}/prefill"


class WorkerView(msgspec.Struct, frozen=True, gc=False):
    """A live worker as a policy sees it.

    Attributes:
        load_tokens: resident KV tokens, including dispatches that no snapshot shows yet.
        requests: engine requests running, queued or on their way.
        capacity: engine requests that it may receive in this round.
        waiting: part of ``requests`` that is queued in the engine.
        kv_usage: fraction of its KV memory in use; 0 if unknown.
        admissible_tokens: KV tokens that it can take on if it is not idle; None: unknown.
        admissible_blocks: the same in blocks, exact, where its engine tells it.
        kv: blocks that requests take on it; None: it counts KV tokens.
        service_rate: mu, requests per second that each slot completes; equal for all if unknown.
        rate_error: relative standard error of ``service_rate``; 0 for a planned rate.
        pending_prompt_tokens: prompt tokens not computed yet, of requests running, queued or on
            their way.
        max_loras: LoRA adapters that may run at once; 0: no bound is known.
        adapters: requests of the router there by adapter; empty without a bound.
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
    pending_prompt_tokens: int = 0
    admissible_blocks: int | None = None
    kv: KvBlocks | None = None
    max_loras: int = 0
    adapters: Mapping[str, int] = {}

    @property
    def admissible(self) -> int | None:
        """Memory for requests if it is not idle, in units of ``need``; None: no limit is known."""
        return self.admissible_tokens if self.kv is None else self.admissible_blocks

    @property
    def room(self) -> int | None:
        """Memory for one request; None: no limit is known.

        An idle worker admits whatever its memory holds at all.
        """
        return self.admissible if self.requests else None

    def takes(self, request: Request) -> bool:
        """True if it has a slot, a place for its adapter, and memory for all of a request."""
        if self.capacity <= 0 or not self.has_place(request.adapter):
            return False
        return (room := self.room) is None or self.need(request) <= room

    def has_place(self, adapter: str) -> bool:
        """Whether the adapter, if any, runs here or may run beside those that do."""
        free = not self.max_loras or len(self.adapters) < self.max_loras
        return free or not adapter or adapter in self.adapters

    def need(self, request: Request) -> int:
        """Part of ``room`` that a request takes: blocks, or KV tokens if it counts those."""
        if self.kv is None:
            return request.load_tokens
        return request.slots * self.kv.entering(request.prompt_tokens)


Hits = Callable[[Request], Sequence[int]]
"""Prompt tokens of a request that each worker of a group has cached, in the workers' order."""


class Assignment(NamedTuple):
    """One request on one worker; a tuple, since a round may make hundreds in a millisecond."""

    request_id: str
    worker_id: str


class RunningRequest(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One running engine request in a snapshot; ``id`` is the engine's own.

    ``place`` is its number among the running ones, for as long as it runs; None: growth is not sent
    by place.
    """

    id: str
    prompt_tokens: Count
    generated_tokens: Count
    cached_tokens: Count = 0
    prefill_left: Count = 0
    end_probability: Share | None = None
    place: Place | None = None


class PromptChain(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Ids of the full blocks of an engine request, as ``router.core.prefix.ids`` makes them.

    It is sent for requests of routers: once they are admitted with the blocks of their prompt, and
    at their end with those that the answer has filled.

    Attributes:
        id: the engine's own.
        first: position of the first block in the request.
        blocks: eight bytes each.
    """

    id: str
    first: Count
    blocks: bytes


class KvGroup(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One KV group of a model; hybrid models have several, which share one pool of blocks.

    Attributes:
        block_size: tokens of a block, on all GPUs that share it (decode context parallelism).
        blocks_used: of the pool, as ``blocks_total``.
        kind: ``full``, ``sliding``, ``chunked`` or ``mamba``; any other keeps every token.
        window: tokens that attention reads at most; 0: all.
        ahead_tokens: tokens beyond its own for which a request takes blocks: speculative ones.
        most_entering: most blocks that a request needs to enter; 0: no bound.
        most_held: most blocks that it holds while it decodes; 0: no bound.
    """

    block_size: Count
    blocks_used: Count
    blocks_total: Count
    kind: Name = "full"
    window: Count = 0
    ahead_tokens: Count = 0
    most_entering: Count = 0
    most_held: Count = 0


class Snapshot(msgspec.Struct, frozen=True, gc=False):
    """State of one worker after one step, schema 1.

    A ``full`` snapshot lists all running requests. A ``delta`` lists those that are new, in prefill
    or otherwise changed; every other running request grew by exactly one token. A ``growth`` is a
    delta whose other requests grew as ``growths`` tells. A ``stateless`` one has no state: its
    engine's plug-in cannot read it; only its sender and ``unreported`` count.

    Attributes:
        epoch: id of the engine's run, new at every start.
        sequence: grows by one per message of an epoch; a full one repeats the latest.
        step: number of the barrier step that has just ended, equal on all ranks of a barrier.
        time_s: wall clock (seconds since 1970) at the end of the step.
        scheduled_decode_tokens: without drafts that were rejected.
        waited_s: part of ``step_s`` spent waiting for other ranks; None: not measured.
        admission: the plug-in's policy; ``ADMISSION_ENDED`` after a fault; None: the engine's own.
        waiting_routed: part of ``waiting`` that routers have sent; None: unknown.
        admissible_kv_tokens: longest prompt that admission would let in with an empty queue.
        admissible_blocks: KV blocks for which it would let requests in; None: unknown.
        growths: tokens that each request of the message before gained, by place; ``FREE_PLACE``
            where there was none, 1 for those that ``running`` lists.
        cache_block: tokens of a block of the prefix cache; 0: the engine tells nothing of it.
        blocks_stored: ids of blocks that are in the prefix cache since the message before; all of
            them in a full one. Eight bytes each, as ``router.core.prefix.ids`` makes them.
        blocks_removed: ids of blocks that are no longer in it.
        blocks_cleared: whether it was emptied before these were stored.
        chains: blocks of requests that entered or ended.
        prompt_budget: prompt tokens that the last step could hold by the budgets of routers; 0: it
            had no such bound; None: the engine takes none.
        ranks: engines that stand and fall with this one, itself included; 0: it does not tell.
        wave: how often all ranks of the group have been idle.
        wave_step: number of the step among those since then, counted alike on all ranks, restarted
            ones included; 0: it does not tell.
        max_loras: LoRA adapters whose requests may run at once; 0: no bound, or it does not tell.
        unreported: what the engine's plug-in cannot read of this vLLM, by the names of
            ``engine_patches.plugin.compat_names``; fields that need it have their defaults.
    """

    kind: Literal["full", "delta", "growth", "stateless"]
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
    admissible_blocks: Number | None = None
    growths: Annotated[bytes, Meta(max_length=2 * MOST_RUNNING)] = b""
    cache_block: Count = 0
    blocks_stored: bytes = b""
    blocks_removed: bytes = b""
    blocks_cleared: bool = False
    chains: Annotated[tuple[PromptChain, ...], Meta(max_length=MOST_ENDED)] = ()
    prompt_budget: Count | None = None
    ranks: Count = 0
    wave: Number = 0
    wave_step: Number = 0
    max_loras: Count = 0
    unreported: Annotated[tuple[Name, ...], Meta(max_length=64)] = ()
