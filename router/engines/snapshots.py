"""Snapshots from the engines: ZMQ on one side, ``SnapshotReceived`` events on the other.

The sockets' file descriptors are watched by the event loop itself; futures of ``zmq.asyncio`` would
cost more per message than decoding it. ZMQ signals a descriptor once, not per message, and any call
on a socket may eat the signal: so each socket is read until it is empty, after a send as well.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping

import zmq

from router.errors import ConfigError, SnapshotError
from router.types import SnapshotReceived, WorkerSpec
from router.wire import decode, full_endpoint

log = logging.getLogger(__name__)

FULL_INTERVAL_S = 0.2
FULL_INTERVAL_MAX_S = 5.0

_BATCH = 256
_REASONS = 16
_DEFAULT_MAX_SOCKETS = 1023
_OPTIONS: Mapping[int, int] = {
    zmq.LINGER: 0,
    zmq.IPV6: 1,
    zmq.RECONNECT_IVL: 100,
    zmq.RECONNECT_IVL_MAX: 1000,
    # An engine's machine that vanished without closing its connections is dialled anew.
    zmq.HEARTBEAT_IVL: 1000,
    zmq.HEARTBEAT_TIMEOUT: 3000,
}

_Socket = zmq.Socket[bytes]


class _Stream:
    """Sockets of one worker.

    Attributes:
        asked: runs until a full snapshot may be asked for again.
        interval_s: how long that is; it doubles while no answer comes.
        reasons: why messages were refused, as far as the log has it.
    """

    __slots__ = ("asked", "dealer", "interval_s", "reasons", "sub", "worker_id")

    def __init__(self, worker_id: str, sub: _Socket, dealer: _Socket) -> None:
        self.worker_id = worker_id
        self.sub = sub
        self.dealer = dealer
        self.asked: asyncio.TimerHandle | None = None
        self.interval_s = FULL_INTERVAL_S
        self.reasons: set[str] = set()


class SnapshotClient:
    """Receives the snapshots of all workers that publish them.

    A full snapshot is asked for at the start, and again for as long as the cluster wants one.

    Args:
        specs: workers; those without a snapshot endpoint are passed over.
        apply: takes each snapshot.
        full_wanted: whether a full snapshot of this worker is wanted.
        clock: seconds, monotonic.

    Attributes:
        received: snapshots that were understood.
        received_bytes: size of all messages.
        broken: messages that were not understood.
        full_requests: full snapshots that were asked for.
        failures: snapshots that ``apply`` raised at.
    """

    def __init__(
        self,
        specs: Iterable[WorkerSpec],
        apply: Callable[[SnapshotReceived], None],
        full_wanted: Callable[[str], bool],
        clock: Callable[[], float],
    ) -> None:
        self.received = 0
        self.received_bytes = 0
        self.broken = 0
        self.full_requests = 0
        self.failures = 0
        self._endpoints = {spec.id: spec.snapshots for spec in specs if spec.snapshots is not None}
        self._apply = apply
        self._full_wanted = full_wanted
        self._clock = clock
        self._streams: list[_Stream] = []
        self._context: zmq.Context[_Socket] | None = None

    def start(self) -> None:
        """Connect to all workers; call it on the event loop.

        Raises:
            ConfigError: an endpoint that ZMQ does not accept.
        """
        self._context = zmq.Context()
        needed = 2 * len(self._endpoints)
        self._context.set(zmq.MAX_SOCKETS, max(_DEFAULT_MAX_SOCKETS, needed))
        for worker_id, endpoint in self._endpoints.items():
            sub = self._connect(zmq.SUB, endpoint, {})
            sub.setsockopt(zmq.SUBSCRIBE, b"")
            # While nobody answers, one request waits for the engine, not one for every interval.
            dealer = self._connect(zmq.DEALER, full_endpoint(endpoint), {zmq.SNDHWM: 1})
            stream = _Stream(worker_id, sub, dealer)
            self._streams.append(stream)
            self._watch(stream, sub)
            self._watch(stream, dealer)
            self._ask(stream)

    def close(self) -> None:
        """Disconnect; what is on its way is dropped."""
        loop = asyncio.get_running_loop()
        for stream in self._streams:
            if stream.asked is not None:
                stream.asked.cancel()
            for socket in (stream.sub, stream.dealer):
                loop.remove_reader(socket.fileno())
        self._streams.clear()
        if self._context is not None:
            self._context.destroy(linger=0)

    def _connect(self, kind: int, endpoint: str, options: Mapping[int, int]) -> _Socket:
        assert self._context is not None
        socket = self._context.socket(kind)
        for option, value in {**_OPTIONS, **options}.items():
            socket.setsockopt(option, value)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            socket.close()
            raise ConfigError(f"snapshots {endpoint!r}: {error}") from error
        return socket

    def _watch(self, stream: _Stream, socket: _Socket) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(socket.fileno(), self._drain, stream, socket)
        loop.call_soon(self._drain, stream, socket)

    def _drain(self, stream: _Stream, socket: _Socket) -> None:
        for _ in range(_BATCH):
            if socket.closed:
                return
            try:
                message = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(stream, message)
        asyncio.get_running_loop().call_soon(self._drain, stream, socket)

    def _take(self, stream: _Stream, message: bytes) -> None:
        self.received_bytes += len(message)
        try:
            snapshot = decode(message)
        except SnapshotError as error:
            self._refuse(stream, str(error))
            return
        self.received += 1
        if snapshot.kind == "full":
            stream.interval_s = FULL_INTERVAL_S
        try:
            self._apply(SnapshotReceived(stream.worker_id, snapshot, self._clock()))
        except Exception:
            self.failures += 1
            log.exception("%s: a snapshot could not be applied", stream.worker_id)
        self._ask_if_wanted(stream)

    def _refuse(self, stream: _Stream, reason: str) -> None:
        self.broken += 1
        if reason not in stream.reasons and len(stream.reasons) < _REASONS:
            stream.reasons.add(reason)
            log.warning("%s: snapshot refused: %s", stream.worker_id, reason)

    def _ask_if_wanted(self, stream: _Stream) -> None:
        if stream.asked is None and self._full_wanted(stream.worker_id):
            self._ask(stream)

    def _ask(self, stream: _Stream) -> None:
        loop = asyncio.get_running_loop()
        try:
            stream.dealer.send(b"", zmq.NOBLOCK)
            self.full_requests += 1
        except zmq.Again:
            pass  # the last request has not left yet
        loop.call_soon(self._drain, stream, stream.dealer)
        stream.asked = loop.call_later(stream.interval_s, self._ask_again, stream)
        stream.interval_s = min(2 * stream.interval_s, FULL_INTERVAL_MAX_S)

    def _ask_again(self, stream: _Stream) -> None:
        stream.asked = None
        self._ask_if_wanted(stream)
