"""The engine's side of the state stream: publishes each step's state as a small delta.

Deltas leave on a PUB socket, which drops what a slow router does not take and never delays a step.
A ROUTER socket serves full snapshots, and takes prompt budgets. The vLLM plug-in and the emulator
use ``SnapshotPublisher``.
"""

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import msgspec
import zmq

from engine_patches.stream.cached_blocks import CachedBlocks, Changes
from engine_patches.stream.prompt_leases import PromptLeases
from engine_patches.stream.rows import PlacedRow, ReportedRows, Row
from router.core.errors import SnapshotError
from router.core.types import DEFAULT_SLOTS, SCHEMA_VERSION, KvGroup, PromptChain, RunningRequest
from router.core.wire import decode_budget, full_endpoint

HEARTBEAT_S = 1.0

UNREAD_MESSAGES = 1000
"""How many messages are kept for a router that does not read; it misses what comes after them."""


class _Reported(msgspec.Struct, omit_defaults=True):
    """Fields of ``types.Snapshot`` that an engine reports after a step."""

    step: int  # the barrier step that has just ended; repeated if something else changed
    time_s: float
    step_s: float  # 0 if the number is repeated
    finished: Sequence[str] = ()  # ended since the last report, whether they ran or only waited
    preempted: Sequence[str] = ()  # lost their slot since the last report and wait again
    waiting: int = 0
    waiting_tokens: int = 0
    slots: int = DEFAULT_SLOTS
    kv_groups: tuple[KvGroup, ...] = ()
    admissible_kv_tokens: int | None = None
    admission: str | None = None
    scheduled_prefill_tokens: int = 0
    scheduled_decode_tokens: int = 0
    preemptions_total: int = 0
    waited_s: float | None = None
    power_w: float | None = None
    energy_j: float | None = None
    waiting_routed: int | None = None
    admissible_blocks: int | None = None
    prompt_budget: int | None = None
    wave: int = 0
    wave_step: int = 0
    max_loras: int = 0
    unreported: Sequence[str] = ()


class StepReport(_Reported):
    """The whole state of one worker after one step."""

    # Running requests; also those that ended with this step, unless they gained one token.
    rows: Sequence[Row] = ()


class SnapshotMessage(_Reported, omit_defaults=True, kw_only=True):
    """A mutable ``types.Snapshot``: one object is reused for all messages."""

    group: str
    worker: str
    rank: int
    ranks: int = 0
    epoch: str
    version: int
    sequence: int
    kind: Literal["full", "delta", "growth", "stateless"]
    running: Sequence[RunningRequest] = ()
    growths: bytes = b""
    cache_block: int = 0
    blocks_stored: bytes = b""
    blocks_removed: bytes = b""
    blocks_cleared: bool = False
    chains: Sequence[PromptChain] = ()


# A later message of an idle worker, with no step since the one before.
_NO_STEP: dict[str, Any] = {
    "step_s": 0.0,
    "growths": b"",
    "running": (),
    "finished": (),
    "preempted": (),
    "scheduled_prefill_tokens": 0,
    "scheduled_decode_tokens": 0,
}
_encode = msgspec.msgpack.Encoder().encode


class SnapshotPublisher:
    """Publishes one worker's state; safe to ``publish`` in one thread and ``poll`` in another.

    zmq.ZMQError: an endpoint cannot be bound.

    Args:
        endpoint: of the stream; full snapshots are served at its ``full_endpoint``.
        ranks: engines that stand and fall with this one, itself included; 0: unknown.
        initial: published at once as a full snapshot.
        clock: wall clock, seconds since 1970.
        rows: all running requests for a full snapshot; by default those last published.
        prepare: sets options of both sockets before they are bound.
        cached: the prefix cache; None: nothing is told of it.
        leases: of prompt budgets; None: none is taken.
        stateless: there is no state to tell; messages say only this. It may become true later.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        group: str,
        worker: str,
        rank: int,
        ranks: int = 0,
        initial: StepReport,
        clock: Callable[[], float] = time.time,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        rows: Callable[[], Iterable[Row | PlacedRow]] | None = None,
        prepare: Callable[[zmq.Socket[bytes]], None] = lambda _: None,
        cached: CachedBlocks | None = None,
        leases: PromptLeases | None = None,
        stateless: bool = False,
    ) -> None:
        self.stateless = stateless
        self.epoch = secrets.token_hex(8)
        self.sequence = 0
        # Held while a message is built; hold it to change ``message`` or what ``rows`` returns.
        self.lock = threading.RLock()
        # Last message, heartbeats aside.
        self.message = SnapshotMessage(
            group=group,
            worker=worker,
            rank=rank,
            ranks=ranks,
            epoch=self.epoch,
            version=SCHEMA_VERSION,
            sequence=0,
            kind="delta",
            **{name: getattr(initial, name) for name in _Reported.__struct_fields__},
        )
        self._clock = clock
        self._cached = cached or CachedBlocks(0)
        self._leases = leases
        self._reported = ReportedRows(initial.rows)
        self._all_rows = rows or self._reported.placed
        self._idle = not initial.rows
        self._sent_s = clock()
        context = context or zmq.Context.instance()
        self._stream = context.socket(zmq.PUB)
        # Skips pyzmq's own checks, which are not needed here and cost half as much again.
        self._send: Callable[[bytes, int], object] = super(zmq.Socket, self._stream).send
        self._requests = context.socket(zmq.ROUTER)
        ends = (self._stream, endpoint), (self._requests, full_endpoint(endpoint))
        try:
            for socket, address in ends:
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.SNDHWM, UNREAD_MESSAGES)
                prepare(socket)
                socket.bind(address)
        except zmq.ZMQError:
            self.close()
            raise
        self._stream.send(self._full(), zmq.NOBLOCK)

    def publish(self, report: StepReport) -> None:
        """Send the changes since the last report; never blocks."""
        with self.lock:
            told = report.rows, report.finished, report.preempted
            placed, ended, growths = self._reported.change(*told)
            for field in _Reported.__struct_fields__:
                setattr(self.message, field, getattr(report, field))
            idle = self._reported.idle
            self.publish_changes(placed, ended, report.preempted, idle=idle, growths=growths)

    def publish_changes(
        self,
        rows: Iterable[Row | PlacedRow],
        finished: Sequence[str],
        preempted: Sequence[str],
        *,
        idle: bool,
        growths: bytes = b"",
    ) -> None:
        """Send ``message``, updated by the caller, as a delta; never blocks.

        For a publisher with its own ``rows``. The caller holds ``lock``. ``growths`` are those of
        ``Places``, empty if all that are not in ``rows`` gained one token.
        """
        self._idle = idle
        message = self.message
        message.kind, message.growths = "growth" if growths else "delta", growths
        message.running = [RunningRequest(*row) for row in rows]
        message.finished, message.preempted = finished, preempted
        self._send_delta(message)

    def poll(self, timeout_s: float = 0.0) -> int:
        """Answer requests, take budgets, and send the heartbeat of an idle worker when due.

        Call it when ``request_fd`` becomes readable and also about four times a second, or in a
        loop in a thread. It waits up to ``timeout_s`` for a first request.
        Returns the number of messages read.
        """
        if timeout_s > 0:
            self._requests.poll(int(timeout_s * 1e3))
        with self.lock:
            now_s = self._clock()
            # The clock may have been set back since.
            due = not 0 <= now_s - self._sent_s < HEARTBEAT_S
            if (self._idle or self.stateless) and due:
                told = msgspec.structs.replace(self.message, time_s=now_s, **_NO_STEP)
                told.kind = "stateless" if self.stateless else "delta"
                self._send_delta(told)
        answered = 0
        while self._answer_one():
            answered += 1
        return answered

    @property
    def request_fd(self) -> int:
        """File descriptor, readable when requests may be there; edge-triggered."""
        return int(self._requests.getsockopt(zmq.FD))

    def close(self) -> None:
        """Unsent messages are dropped."""
        self._stream.close(0)
        self._requests.close(0)

    def _answer_one(self) -> bool:
        try:
            frames = self._requests.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        if frames[-1] and self._leases is not None:
            # The snapshots tell its sender if it is not in force.
            with contextlib.suppress(SnapshotError):
                told = decode_budget(frames[-1])
                if told.epoch == self.epoch:
                    self._leases.take(told, self._clock())
            return True
        with self.lock:
            answer = self._full()
        envelope = 2 if len(frames) > 2 and not frames[1] else 1
        self._requests.send_multipart([*frames[:envelope], answer], zmq.NOBLOCK)
        return True

    def _full(self) -> bytes:
        if self.stateless:
            told = msgspec.structs.replace(self.message, sequence=self.sequence, **_NO_STEP)
            told.kind = "stateless"
            return _encode(told)
        full = msgspec.structs.replace(
            self.message,
            kind="full",
            sequence=self.sequence,
            finished=(),
            preempted=(),
            running=[RunningRequest(*row) for row in self._all_rows()],
            growths=b"",
            **Changes(self._cached.block_tokens, self._cached.held())._asdict(),
        )
        return _encode(full)

    def _send_delta(self, message: SnapshotMessage) -> None:
        self.sequence += 1
        message.sequence = self.sequence
        if self._cached.block_tokens or message.cache_block:
            changes = self._cached.take()
            message.cache_block, message.blocks_stored, message.blocks_removed = changes[:3]
            message.blocks_cleared, message.chains = changes[3:]
        self._sent_s = message.time_s
        self._send(_encode(message), zmq.NOBLOCK)
