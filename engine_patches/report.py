"""The engine's side of the state stream: each step's state goes out as a small delta.

Deltas leave on a PUB socket, which drops what a slow router does not take and never delays a
step; a full snapshot is given to whoever asks on a ROUTER socket. The vLLM plug-in and the
emulator both report through ``SnapshotPublisher``.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import msgspec
import zmq

from router.types import DEFAULT_SLOTS, SCHEMA_VERSION, KvGroup, RunningRequest
from router.wire import full_endpoint

Row = tuple[str, int, int, int, int, float | None]
"""The fields of ``RunningRequest``, in its order: one is made per running request and step."""

HEARTBEAT_S = 1.0

UNREAD_MESSAGES = 1000
"""How many messages are kept for a router that does not read; it misses what comes after them."""


class StepReport(msgspec.Struct, frozen=True):
    """The whole state of one worker after one step.

    Attributes:
        step: the barrier step that has just ended; repeated when something else changed.
        step_s: how long the step took; 0 when the step number is repeated.
        rows: every running request.
        finished: ids that ended since the last report, whether they ran or only waited.
        preempted: ids that lost their slot since the last report and wait again.
        waited_s, admission, waiting_routed: see ``Snapshot``.
    """

    step: int
    time_s: float
    step_s: float
    rows: Sequence[Row] = ()
    finished: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
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


class SnapshotMessage(msgspec.Struct, omit_defaults=True):
    """As ``types.Snapshot``, but can be changed: one is used again and again."""

    group: str
    worker: str
    rank: int
    epoch: str
    step: int
    time_s: float
    step_s: float
    slots: int
    version: int
    sequence: int
    kind: Literal["full", "delta"]
    running: Sequence[RunningRequest] = ()
    finished: Sequence[str] = ()
    preempted: Sequence[str] = ()
    waiting: int = 0
    waiting_tokens: int = 0
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


_REPORTED = tuple(
    field for field in StepReport.__struct_fields__ if field in SnapshotMessage.__struct_fields__
)
_encode = msgspec.msgpack.Encoder().encode


def changed_rows(previous: Mapping[str, Row], rows: Iterable[Row]) -> list[Row]:
    """Rows that a delta must list: new ones, and those that did not just grow by one token."""
    changed = []
    for row in rows:
        old = previous.get(row[0])
        if old is None or row[2] != old[2] + 1 or row[3:] != old[3:] or row[1] != old[1]:
            changed.append(row)
    return changed


def ended_ids(
    previous: Mapping[str, Row],
    current: Mapping[str, Row],
    finished: Sequence[str],
    preempted: Sequence[str],
) -> tuple[str, ...]:
    """Ids that a delta must call finished: those reported, and whatever else stopped running."""
    told = {*finished, *preempted}
    return (*finished, *(id_ for id_ in previous if id_ not in current and id_ not in told))


def _nothing(_socket: zmq.Socket[bytes]) -> None:
    """The options that a socket has by itself."""


class SnapshotPublisher:
    """Publishes one worker's state; safe to ``publish`` in one thread and ``poll`` in another.

    Args:
        endpoint: where the stream is bound; full snapshots are given at ``full_endpoint`` of it.
        group: the worker's group.
        worker: the worker's name.
        rank: its data-parallel rank.
        initial: the state at the start, published at once as a full snapshot.
        clock: wall clock, seconds since 1970.
        context: ZMQ context to use, the process's own by default.
        rows: all that runs, for a full snapshot; by default what ``publish`` was last given.
        prepare: sets options of both sockets before they are bound.

    Attributes:
        lock: held while a message is made; whoever changes what ``rows`` returns, or ``message``,
            holds it.
        message: what was said last, heartbeats aside.

    Raises:
        zmq.ZMQError: an endpoint cannot be bound.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        group: str,
        worker: str,
        rank: int,
        initial: StepReport,
        clock: Callable[[], float] = time.time,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        rows: Callable[[], Iterable[Row]] | None = None,
        prepare: Callable[[zmq.Socket[bytes]], None] = _nothing,
    ) -> None:
        self.epoch = secrets.token_hex(8)
        self.sequence = 0
        self.lock = threading.RLock()
        self.message = SnapshotMessage(
            group=group,
            worker=worker,
            rank=rank,
            epoch=self.epoch,
            step=initial.step,
            time_s=initial.time_s,
            step_s=initial.step_s,
            slots=initial.slots,
            version=SCHEMA_VERSION,
            sequence=0,
            kind="delta",
        )
        self._note(initial)
        self._clock = clock
        self._rows = {row[0]: row for row in initial.rows}
        self._all_rows = rows or self._rows_published
        self._idle = not initial.rows
        self._sent_s = clock()
        self._prepare = prepare
        context = context or zmq.Context.instance()
        self._stream = context.socket(zmq.PUB)
        # pyzmq's own, without its checks of what is not used here: they take half as long again.
        self._send: Callable[[bytes, int], object] = super(zmq.Socket, self._stream).send
        self._requests = context.socket(zmq.ROUTER)
        self._bind(endpoint)
        self._stream.send(self._full(), zmq.NOBLOCK)

    def _bind(self, endpoint: str) -> None:
        try:
            for socket, address in (
                (self._stream, endpoint),
                (self._requests, full_endpoint(endpoint)),
            ):
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.SNDHWM, UNREAD_MESSAGES)
                self._prepare(socket)
                socket.bind(address)
        except zmq.ZMQError:
            self.close()
            raise

    def publish(self, report: StepReport) -> None:
        """Send what changed since the last report; never blocks."""
        with self.lock:
            rows = {row[0]: row for row in report.rows}
            ended = ended_ids(self._rows, rows, report.finished, report.preempted)
            changed = changed_rows(self._rows, report.rows)
            self._note(report)
            self._rows = rows
            self.publish_changes(changed, ended, report.preempted, idle=not rows)

    def publish_changes(
        self,
        rows: Iterable[Row],
        finished: Sequence[str],
        preempted: Sequence[str],
        *,
        idle: bool,
    ) -> None:
        """Send ``message``, brought up to date by the caller, as a delta; never blocks.

        For a publisher that was given ``rows``. The caller holds ``lock``.

        Args:
            rows: running requests that a delta must list.
            finished: ids that ended.
            preempted: ids that lost their slot.
            idle: whether nothing runs any more.
        """
        self._idle = idle
        message = self.message
        message.running = [RunningRequest(*row) for row in rows]
        message.finished, message.preempted = finished, preempted
        self._send_delta(message)

    def poll(self, timeout_s: float = 0.0) -> int:
        """Answer requests for full snapshots, and send the heartbeat of an idle worker when due.

        Call it when ``request_fd`` becomes readable and about four times a second besides, or in a
        loop in a thread.

        Args:
            timeout_s: how long to wait for a first request.

        Returns:
            How many requests were answered.
        """
        if timeout_s > 0:
            self._requests.poll(int(timeout_s * 1e3))
        self._beat()
        answered = 0
        while self._answer_one():
            answered += 1
        return answered

    @property
    def request_fd(self) -> int:
        """Becomes readable when requests may have come (edge-triggered: ``poll`` takes all)."""
        return int(self._requests.getsockopt(zmq.FD))

    def close(self) -> None:
        """Release both endpoints, dropping what was not yet sent."""
        self._stream.close(0)
        self._requests.close(0)

    def _beat(self) -> None:
        with self.lock:
            now_s = self._clock()
            if not self._idle or now_s - self._sent_s < HEARTBEAT_S:
                return
            self._send_delta(_repeated(self.message, now_s))

    def _answer_one(self) -> bool:
        try:
            frames = self._requests.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        with self.lock:
            answer = self._full()
        envelope = 2 if len(frames) > 2 and not frames[1] else 1
        self._requests.send_multipart([*frames[:envelope], answer], zmq.NOBLOCK)
        return True

    def _full(self) -> bytes:
        rows = [RunningRequest(*row) for row in self._all_rows()]
        full = msgspec.structs.replace(
            self.message,
            kind="full",
            sequence=self.sequence,
            running=rows,
            finished=(),
            preempted=(),
        )
        return _encode(full)

    def _rows_published(self) -> Iterable[Row]:
        return self._rows.values()

    def _note(self, report: StepReport) -> None:
        for field in _REPORTED:
            setattr(self.message, field, getattr(report, field))

    def _send_delta(self, message: SnapshotMessage) -> None:
        self.sequence += 1
        message.sequence = self.sequence
        self._sent_s = message.time_s
        self._send(_encode(message), zmq.NOBLOCK)


def _repeated(message: SnapshotMessage, time_s: float) -> SnapshotMessage:
    """The same state of an idle worker at a later time, with no step in between."""
    return msgspec.structs.replace(
        message,
        time_s=time_s,
        step_s=0.0,
        running=(),
        finished=(),
        preempted=(),
        scheduled_prefill_tokens=0,
        scheduled_decode_tokens=0,
    )
