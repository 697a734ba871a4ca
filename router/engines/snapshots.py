"""Snapshots from the engines: ZMQ on one side, ``SnapshotReceived`` events on the other.

The sockets' file descriptors are watched together, by one epoll that the event loop watches: what
comes within a millisecond is read in one go, since waking up costs more than a snapshot does, and
futures of ``zmq.asyncio`` would cost more still. ZMQ signals a descriptor once, not per message,
and any call on a socket may eat the signal: so sockets are read until they are empty, after a send
as well; one message of each in turn, for ranks that step together to stay together when read late.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import zmq
from zmq.utils.monitor import parse_monitor_message

from router.engines.curve import KeyPair
from router.engines.identity import foreign_stream, given_names
from router.errors import ConfigError, SnapshotError
from router.types import Snapshot, SnapshotReceived, WorkerSpec
from router.wire import decode, full_endpoint

log = logging.getLogger(__name__)

FULL_INTERVAL_S = 0.2
FULL_INTERVAL_MAX_S = 5.0
REDIAL_S = 5.0

_BATCH = 256
_PAUSE_S = 0.001
_READABLE = int(zmq.POLLIN)
_REASONS = 16
_DEFAULT_MAX_SOCKETS = 1023
_SOCKETS_EACH = 4  # two, and two for a monitor
_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_KEYS_DIFFER = (
    "the engine and this router do not accept each other's keys: see that server_key is the "
    "engine's public key, and that the engine's allowed_keys have this router's"
)
_OPTIONS: Mapping[int, int] = {
    zmq.LINGER: 0,
    zmq.IPV6: 1,
    zmq.RECONNECT_IVL: 100,
    zmq.RECONNECT_IVL_MAX: 1000,
    # No heartbeats of ZMQ's: they end a process whose full queue is not read in time ("Assertion
    # failed: _input_stopped"). Engines say something every second; else they are dialled anew.
}

_Socket = zmq.Socket[bytes]
_Reader = Callable[[], bool]


class _Stream:
    """Sockets of one worker.

    Attributes:
        named: the name that the user gave the worker, None where the stream need not have it.
        asked: runs until a full snapshot may be asked for again.
        interval_s: how long that is; it doubles while no answer comes.
        heard: whether anything has come since this was looked at.
        looked: runs until it is looked at.
        epoch: of the engine whose stream it was last seen to be.
        problem: why nothing of it counts now, None as far as all is well.
        reasons: why messages were refused, as far as the log has it.
    """

    __slots__ = (
        "asked",
        "dealer",
        "endpoints",
        "epoch",
        "heard",
        "interval_s",
        "looked",
        "monitor",
        "named",
        "problem",
        "reasons",
        "spec",
    )

    def __init__(
        self, spec: WorkerSpec, named: str | None, endpoints: Sequence[tuple[_Socket, str]]
    ) -> None:
        self.spec = spec
        self.named = named
        self.endpoints = endpoints
        self.dealer = endpoints[1][0]
        self.monitor: _Socket | None = None
        self.asked: asyncio.TimerHandle | None = None
        self.interval_s = FULL_INTERVAL_S
        self.heard = False
        self.looked: asyncio.TimerHandle | None = None
        self.epoch: str | None = None
        self.problem: str | None = None
        self.reasons: set[str] = set()

    @property
    def pending(self) -> bool:
        """Whether there are messages to be read."""
        return any(socket.poll(0) for socket, _ in self.endpoints)

    def dial(self) -> None:
        """Connect.

        Raises:
            ConfigError: an endpoint that ZMQ does not accept.
        """
        for socket, endpoint in self.endpoints:
            try:
                socket.connect(endpoint)
            except zmq.ZMQError as error:
                raise ConfigError(f"snapshots {endpoint!r}: {error}") from error

    def redial(self) -> None:
        """Connect anew: ZMQ dials no more where keys were asked for that it did not have, say."""
        for socket, endpoint in self.endpoints:
            with contextlib.suppress(zmq.ZMQError):  # it has dropped the connection itself
                socket.disconnect(endpoint)
        self.dial()


class SnapshotClient:
    """Receives the snapshots of all workers that publish them.

    A full snapshot is asked for at the start, and again for as long as the cluster wants one.

    Args:
        specs: workers; those without a snapshot endpoint are passed over.
        apply: takes each snapshot.
        full_wanted: whether a full snapshot of this worker is wanted.
        clock: seconds, monotonic.
        keys: the router's CURVE keys, for workers that have a server key.

    Attributes:
        received: snapshots that were understood.
        received_bytes: size of all messages.
        broken: messages that were not understood.
        refused: messages of streams that belong to another worker.
        handshakes_failed: times that an engine and this router did not accept each other's keys.
        full_requests: full snapshots that were asked for.
        failures: snapshots that ``apply`` raised at.
    """

    def __init__(
        self,
        specs: Iterable[WorkerSpec],
        apply: Callable[[SnapshotReceived], None],
        full_wanted: Callable[[str], bool],
        clock: Callable[[], float],
        keys: KeyPair | None = None,
    ) -> None:
        self.received = 0
        self.received_bytes = 0
        self.broken = 0
        self.refused = 0
        self.handshakes_failed = 0
        self.full_requests = 0
        self.failures = 0
        self._specs = list(specs)
        self._keys = keys
        self._apply = apply
        self._full_wanted = full_wanted
        self._clock = clock
        self._streams: dict[str, _Stream] = {}
        self._context: zmq.Context[_Socket] | None = None
        self._readable = select.epoll()
        self._readers: dict[int, _Reader] = {}

    def start(self) -> None:
        """Connect to all workers; call it on the event loop.

        Raises:
            ConfigError: an endpoint that ZMQ does not accept.
        """
        for spec in self._specs:
            if spec.server_key is not None and self._keys is None:
                raise ConfigError(f"worker {spec.id} has a server_key, and the router has no keys")
        self._context = zmq.Context()
        needed = _SOCKETS_EACH * len(self._specs)
        self._context.set(zmq.MAX_SOCKETS, max(_DEFAULT_MAX_SOCKETS, needed))
        names = given_names(self._specs)
        for spec in self._specs:
            if spec.snapshots is not None:
                self._open(spec, spec.snapshots, names[spec.id])
        self._listen()

    def problem(self, worker_id: str) -> str | None:
        """Why a worker's snapshots do not count, as far as that is known."""
        stream = self._streams.get(worker_id)
        return None if stream is None else stream.problem

    def _open(self, spec: WorkerSpec, endpoint: str, named: str | None) -> None:
        sub = self._socket(zmq.SUB, spec, {zmq.SUBSCRIBE: b""})
        # While nobody answers, one request waits for the engine, not one for every interval.
        dealer = self._socket(zmq.DEALER, spec, {zmq.SNDHWM: 1})
        endpoints = ((sub, endpoint), (dealer, full_endpoint(endpoint)))
        stream = self._streams[spec.id] = _Stream(spec, named, endpoints)
        if spec.server_key is not None:
            stream.monitor = sub.get_monitor_socket(_HANDSHAKES)
            self._watch(stream.monitor, partial(self._observe, stream, stream.monitor))
        stream.dial()
        for socket in (sub, dealer):
            self._watch(socket, partial(self._receive, stream, socket))
        self._ask(stream)
        self._look(stream)

    def close(self) -> None:
        """Disconnect; what is on its way is dropped."""
        loop = asyncio.get_running_loop()
        for stream in self._streams.values():
            for timer in (stream.asked, stream.looked):
                if timer is not None:
                    timer.cancel()
        self._streams.clear()
        self._readers.clear()
        if not self._readable.closed:
            loop.remove_reader(self._readable)
            self._readable.close()
        if self._context is not None:
            self._context.destroy(linger=0)

    def _socket(self, kind: int, spec: WorkerSpec, options: Mapping[int, int | bytes]) -> _Socket:
        assert self._context is not None
        socket = self._context.socket(kind)
        for option, value in {**_OPTIONS, **options}.items():
            socket.setsockopt(option, value)
        if spec.server_key is not None and self._keys is not None:
            self._keys.secure(socket, spec.server_key)
        return socket

    def _watch(self, socket: _Socket, read: _Reader) -> None:
        fd = socket.fileno()
        self._readers[fd] = read
        self._readable.register(fd, select.EPOLLIN)
        self._read_soon(socket)

    def _read_soon(self, socket: _Socket) -> None:
        asyncio.get_running_loop().call_soon(self._read, [self._readers[socket.fileno()]])

    def _listen(self) -> None:
        if not self._readable.closed:
            asyncio.get_running_loop().add_reader(self._readable, self._wake)

    def _wake(self) -> None:
        """Read all sockets that have something, then let more come together."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._readable)
        loop.call_later(_PAUSE_S, self._listen)
        self._read([self._readers[fd] for fd, _ in self._readable.poll(0)])

    def _read(self, readers: list[_Reader]) -> None:
        for _ in range(_BATCH):
            if not readers:
                return
            readers = [read for read in readers if read()]
        asyncio.get_running_loop().call_soon(self._read, readers)

    def _observe(self, stream: _Stream, monitor: _Socket) -> bool:
        """Take in how a handshake has ended; True if there may be more."""
        if monitor.closed:
            return False
        try:
            told = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            return False
        if told["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            stream.problem = None
        else:
            self.handshakes_failed += 1
            self._note_problem(stream, _KEYS_DIFFER)
        return True

    def _receive(self, stream: _Stream, socket: _Socket) -> bool:
        """Take in a message; True if there are more."""
        if socket.closed:
            return False
        try:
            message = socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._take(stream, message)
        # Cheaper to ask than to be refused.
        return not socket.closed and bool(int(socket.get(zmq.EVENTS)) & _READABLE)

    def _look(self, stream: _Stream) -> None:
        """Connect anew from time to time while nothing comes, and nothing waits to be read."""
        if stream.looked is not None and not (stream.heard or stream.pending):
            stream.redial()
        stream.heard = False
        for socket, _ in stream.endpoints:
            self._read_soon(socket)  # asking may have eaten a signal
        stream.looked = asyncio.get_running_loop().call_later(REDIAL_S, self._look, stream)

    def _take(self, stream: _Stream, message: bytes) -> None:
        self.received_bytes += len(message)
        stream.heard = True
        try:
            snapshot = decode(message)
        except SnapshotError as error:
            self.broken += 1
            self._say_once(stream, str(error))
            return
        if snapshot.epoch != stream.epoch and not self._belongs(stream, snapshot):
            return
        self.received += 1
        if snapshot.kind == "full":
            stream.interval_s = FULL_INTERVAL_S
        try:
            self._apply(SnapshotReceived(stream.spec.id, snapshot, self._clock()))
        except Exception:
            self.failures += 1
            log.exception("%s: a snapshot could not be applied", stream.spec.id)
        self._ask_if_wanted(stream)

    def _belongs(self, stream: _Stream, snapshot: Snapshot) -> bool:
        """Whether an engine that is new here is the worker's."""
        problem = foreign_stream(stream.spec, stream.named, snapshot)
        if problem is not None:
            self.refused += 1
            self._note_problem(stream, problem)
            return False
        stream.epoch, stream.problem = snapshot.epoch, None
        return True

    def _note_problem(self, stream: _Stream, problem: str) -> None:
        stream.problem = problem
        self._say_once(stream, problem)

    def _say_once(self, stream: _Stream, reason: str) -> None:
        if reason not in stream.reasons and len(stream.reasons) < _REASONS:
            stream.reasons.add(reason)
            log.warning("%s: snapshot refused: %s", stream.spec.id, reason)

    def _ask_if_wanted(self, stream: _Stream) -> None:
        if stream.asked is None and self._full_wanted(stream.spec.id):
            self._ask(stream)

    def _ask(self, stream: _Stream) -> None:
        try:
            stream.dealer.send(b"", zmq.NOBLOCK)
            self.full_requests += 1
        except zmq.Again:
            pass  # the last request has not left yet
        self._read_soon(stream.dealer)
        stream.asked = asyncio.get_running_loop().call_later(
            stream.interval_s, self._ask_again, stream
        )
        stream.interval_s = min(2 * stream.interval_s, FULL_INTERVAL_MAX_S)

    def _ask_again(self, stream: _Stream) -> None:
        stream.asked = None
        self._ask_if_wanted(stream)
