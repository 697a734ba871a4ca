"""Snapshots from the engines: ZMQ messages in, ``SnapshotReceived`` events out.

One SUB socket receives what all workers publish, at half the cost of a socket each. A message's
epoch identifies its sender. A worker's epoch is learned from its answers to requests for full
snapshots, on a socket of its own. Workers with different keys share no socket, so none can
impersonate another.

Messages are read in turns, one per worker, so that ranks in lockstep stay together when read late;
``zmq_reader`` says when.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from uuid import uuid4

import zmq
from zmq.utils.monitor import parse_monitor_message

from router.core.errors import ConfigError, SnapshotError
from router.core.events import SnapshotReceived
from router.core.step_time import StepBudget
from router.core.types import Snapshot, WorkerSpec
from router.core.wire import BudgetMessage, decode, encode, epoch_of
from router.engines.curve_keys import KeyPair
from router.engines.worker_identity import given_names
from router.engines.zmq_reader import Socket, SocketReader, new_context, new_socket, one_by_one
from router.engines.zmq_streams import FULL_INTERVAL_S, SILENCE_S, Channel, Stream

log = logging.getLogger(__name__)

FULL_INTERVAL_MAX_S = 5.0
# An engine sends at least once a second, even without changes.
SILENT_S = 1.5

_NOBLOCK = int(zmq.NOBLOCK)
_REASONS = 16
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

_LOOKS_EVERY = 64  # messages of an engine that takes no budget
_NO_BUDGET = (
    "takes no prompt budget, so that nothing bounds its prompts: its log says why, unless its "
    "plug-in is an older one or has prompt_budget false"
)


class SnapshotClient:
    """Receives the snapshots of all workers that publish them.

    Requests a full snapshot at the start, and again while the cluster wants one.

    Args:
        keys: for workers with a server key.
        up: whether a worker's engine is up; otherwise silence is expected.
        awaited: whether requests wait for snapshots.
        prompt_budget: of a worker's coming step, to tell engines that take it; None: nothing.
    """

    def __init__(
        self,
        specs: Iterable[WorkerSpec],
        apply: Callable[[SnapshotReceived], None],
        full_wanted: Callable[[str], bool],
        clock: Callable[[], float],
        keys: KeyPair | None = None,
        up: Callable[[str], bool] = lambda _: True,
        awaited: Callable[[], bool] = lambda: True,
        prompt_budget: Callable[[str], StepBudget | None] = lambda _: None,
    ) -> None:
        self.received = 0
        self.received_bytes = 0
        self.broken = 0
        self.refused = 0  # messages from another worker's stream
        self.handshakes_failed = 0
        self.full_requests = 0
        self.failures = 0  # snapshots on which ``apply`` raised
        self._specs = {spec.id: spec for spec in specs}
        self._keys = keys
        self._apply = apply
        self._full_wanted = full_wanted
        self._clock = clock
        self._up = up
        self._prompt_budget = prompt_budget
        self._router = uuid4().hex
        self._streams: dict[str, Stream] = {}
        self._channels: dict[str | None, Channel] = {}
        self._reasons: defaultdict[str, set[str]] = defaultdict(set)
        self._context: zmq.Context[Socket] | None = None
        self.sockets = SocketReader(clock, awaited)

    def start(self) -> None:
        """Connect to all workers, on the event loop; ConfigError: an endpoint or keys are wrong."""
        for spec in self._specs.values():
            self._check_keys(spec)
        self._context = new_context()
        names = given_names(self._specs.values())
        for spec in self._specs.values():
            if spec.snapshots is not None:
                self._open(spec, spec.snapshots, names[spec.id])
        self.sockets.start()

    def join(self, spec: WorkerSpec) -> None:
        """Add a worker, unless it raises ConfigError as ``start`` does."""
        self._check_keys(spec)
        self._specs[spec.id] = spec
        names = given_names(self._specs.values())
        if spec.snapshots is not None and self._context is not None:
            try:
                self._open(spec, spec.snapshots, names[spec.id])
            except ConfigError:
                self.leave(spec.id)
                raise
        self._name(names)

    def ask(self) -> None:
        """Have all workers send full snapshots."""
        for stream in self._streams.values():
            stream.interval_s = FULL_INTERVAL_S
            if stream.asked is not None:
                stream.asked.cancel()
            self._ask(stream)

    def leave(self, worker_id: str) -> None:
        self._specs.pop(worker_id, None)  # absent if its stream could not be opened
        self._reasons.pop(worker_id, None)
        stream = self._streams.pop(worker_id, None)
        if stream is not None:
            self._close(stream)
        self._name(given_names(self._specs.values()))

    def _name(self, names: Mapping[str, str | None]) -> None:
        for worker_id, stream in self._streams.items():
            stream.named = names[worker_id]

    def _check_keys(self, spec: WorkerSpec) -> None:
        if spec.server_key is not None and self._keys is None:
            raise ConfigError(f"worker {spec.id} has a server_key, and the router has no keys")

    def problem(self, worker_id: str) -> str | None:
        stream = self._streams.get(worker_id)
        return None if stream is None else stream.problem or stream.fault or stream.silence

    def _open(self, spec: WorkerSpec, endpoint: str, named: str | None) -> None:
        if spec.server_key not in self._channels:
            channel = Channel(self._socket(zmq.SUB, spec, {zmq.SUBSCRIBE: b""}))
            self._channels[spec.server_key] = channel
            self.sockets.watch(channel.socket, partial(self._take_turns, channel))
        channel = self._channels[spec.server_key]
        # Without an answer one request is queued, not one per interval.
        dealer = self._socket(zmq.DEALER, spec, {zmq.SNDHWM: 1})
        stream = self._streams[spec.id] = Stream(spec, named, endpoint, channel, dealer)
        channel.streams.append(stream)
        if spec.server_key is not None:
            stream.monitor = dealer.get_monitor_socket(_HANDSHAKES)
            observed = one_by_one(stream.monitor, partial(self._observe, stream))
            self.sockets.watch(stream.monitor, observed)
        self.sockets.watch(dealer, one_by_one(dealer, partial(self._take_answer, stream)))
        stream.dial()
        self._ask(stream)
        self._look(stream)

    def close(self) -> None:
        for stream in self._streams.values():
            stream.cancel_timers()
        self._streams.clear()
        self._channels.clear()
        self.sockets.close()
        if self._context is not None:
            self._context.destroy(linger=0)

    def _socket(self, kind: int, spec: WorkerSpec, options: Mapping[int, int | bytes]) -> Socket:
        assert self._context is not None
        return new_socket(self._context, kind, options, self._keys, spec.server_key)

    def _close(self, stream: Stream) -> None:
        for socket in (stream.dealer, stream.monitor):
            if socket is not None:
                self.sockets.forget(socket)
        stream.close()
        if not stream.channel.streams:
            del self._channels[stream.spec.server_key]
            self.sockets.forget(stream.channel.socket)
            stream.channel.socket.close(linger=0)

    def _observe(self, stream: Stream, frames: list[bytes]) -> None:
        if parse_monitor_message(frames)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            stream.problem = None if stream.problem == _KEYS_DIFFER else stream.problem
        else:
            self.handshakes_failed += 1
            stream.problem = _KEYS_DIFFER
            self._say_once(stream.name, _KEYS_DIFFER)

    def _take_turns(self, channel: Channel) -> bool:
        """Process up to one message per worker; True if there may be more."""
        if channel.socket.closed:
            return False
        messages, more = _received(channel.socket, len(channel.streams))
        if not more:
            channel.emptied_s = self._clock()
        # Decode all, then apply all: each code path stays in the processor's caches.
        for snapshot in [self._decode(message, channel) for message in messages]:
            if snapshot is not None:
                stream = channel.sender(snapshot.epoch)
                if stream is not None:
                    self._receive(stream, snapshot)
                else:
                    self._introduce(channel)
        return more

    def _take_answer(self, stream: Stream, frames: list[bytes]) -> None:
        stream.hear(self._clock())
        snapshot = self._decode(frames[0], stream)
        if snapshot is not None:
            self._receive(stream, snapshot)

    def _look(self, stream: Stream) -> None:
        now_s = self._clock()
        if stream.looked is None or not self._up(stream.name):
            stream.expected_s = now_s
        if stream.looked is not None and stream.silent(now_s):
            stream.redial()
            if stream.miss(now_s):
                log.warning("%s: %s", stream.name, stream.silence)
        for socket in (stream.channel.socket, stream.dealer):
            self.sockets.read_soon(socket)  # polling may have consumed a signal
        stream.looked = asyncio.get_running_loop().call_later(SILENCE_S, self._look, stream)

    def _introduce(self, channel: Channel) -> None:
        """Request full snapshots from silent workers, to identify an unknown epoch."""
        now_s = self._clock()
        if now_s - channel.introduced_s < FULL_INTERVAL_S:
            return
        channel.introduced_s = now_s
        for stream in channel.streams:
            if stream.asked is None and now_s - stream.heard_s > SILENT_S:
                self._ask(stream)
            else:
                self._ask_if_wanted(stream)

    def _decode(self, message: bytes, sender: Channel | Stream) -> Snapshot | None:
        self.received_bytes += len(message)
        try:
            return decode(message)
        except SnapshotError as error:
            self.broken += 1
            known = sender.sender(epoch_of(message)) if isinstance(sender, Channel) else sender
            if known is not None:
                known.fault = f"snapshot refused: {error}"
                self._ask_if_wanted(known)
            self._say_once((known or sender).name, str(error))
            return None

    def _receive(self, stream: Stream, snapshot: Snapshot) -> None:
        now_s = self._clock()
        stream.hear(now_s)
        if snapshot.epoch != stream.epoch:
            stream.problem = stream.meet(snapshot)
            if stream.problem is not None:
                self._say_once(stream.name, stream.problem)
        if stream.foreign:
            self.refused += 1
            return
        self.received += 1
        if snapshot.kind == "full":
            stream.interval_s = FULL_INTERVAL_S
        for note in stream.notes(snapshot):
            log.warning("%s: %s", stream.name, note)
        try:
            self._apply(SnapshotReceived(stream.name, snapshot, now_s))
            if snapshot.kind == "full":
                stream.fault = None
        except Exception as error:
            self.failures += 1
            stream.fault = f"a snapshot could not be applied: {error!r:.200}"
            if self._is_news(stream.name, stream.fault):
                log.exception("%s: a snapshot could not be applied", stream.name)
        self._tell_budget(stream, snapshot)
        self._ask_if_wanted(stream)

    def _tell_budget(self, stream: Stream, snapshot: Snapshot) -> None:
        if snapshot.prompt_budget is None:
            if snapshot.sequence % _LOOKS_EVERY == 0:
                self._miss_budget(stream.name)
            return
        budget = self._prompt_budget(stream.name)
        if budget is None or not stream.owes_budget(budget, snapshot):
            return
        told = BudgetMessage(self._router, snapshot.epoch, snapshot.time_s, *budget)
        with suppress(zmq.Again):  # an earlier message is still queued
            stream.dealer.send(encode(told), zmq.NOBLOCK)
            stream.told = told

    def _miss_budget(self, worker_id: str) -> None:
        """Name once a worker that takes no budget, if there is one for it."""
        if self._prompt_budget(worker_id) is not None and self._is_news(worker_id, _NO_BUDGET):
            log.warning("%s: %s", worker_id, _NO_BUDGET)

    def _say_once(self, sender: str, reason: str) -> None:
        if self._is_news(sender, reason):
            log.warning("%s: snapshot refused: %s", sender, reason)

    def _is_news(self, sender: str, reason: str) -> bool:
        reasons = self._reasons[sender]
        news = reason not in reasons and len(reasons) < _REASONS
        if news:
            reasons.add(reason)
        return news

    def _ask_if_wanted(self, stream: Stream) -> None:
        if stream.asked is None and self._full_wanted(stream.name):
            self._ask(stream)

    def _ask(self, stream: Stream) -> None:
        try:
            stream.dealer.send(b"", zmq.NOBLOCK)
            self.full_requests += 1
        except zmq.Again:
            pass  # the last request is still queued
        self.sockets.read_soon(stream.dealer)

        def again() -> None:
            stream.asked = None
            self._ask_if_wanted(stream)

        stream.asked = asyncio.get_running_loop().call_later(stream.interval_s, again)
        stream.interval_s = min(2 * stream.interval_s, FULL_INTERVAL_MAX_S)


def _received(socket: Socket, most: int) -> tuple[Sequence[bytes], bool]:
    messages: list[bytes] = []
    try:
        while len(messages) < most:
            messages.append(socket.recv(_NOBLOCK))
    except zmq.Again:
        return messages, False
    return messages, True
