"""KV events of engines without the plug-in: ZMQ messages in, ``CacheTold`` events out.

A message ends with its number (8 bytes) and a batch of events. A replay socket repeats earlier ones
from a number on. An engine with neither is no error: it may publish nothing for hours.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import zmq

from router.core.errors import ConfigError, SnapshotError
from router.core.events import CacheTold
from router.core.prefix.kv_events import KvEventStream, decode_events
from router.core.types import Snapshot, WorkerSpec
from router.engines.zmq_reader import Socket, SocketReader, new_context, new_socket, one_by_one

log = logging.getLogger(__name__)

# An engine answers between two steps.
_PATIENCE_S = 5.0
_NUMBER_BYTES = 8
_END = b"\xff" * _NUMBER_BYTES


class _Engine:
    def __init__(self, spec: WorkerSpec, published: Socket, replay: Socket | None) -> None:
        self.worker_id = spec.id
        self.sockets = [published] if replay is None else [published, replay]
        self.replay = replay
        self.stream = KvEventStream(repeats=replay is not None)
        # When the first message came that waits for the answer; None: nothing was asked.
        self.asked_s: float | None = None
        self.asked_of = 0  # the stream's start that it was asked for
        self.told = self.complained = False


class KvEventReader:
    """Receives the KV events of all workers with such an endpoint.

    Args:
        known: whether what a worker has told is still believed; else it has been down.
        sockets: reads them; it is started and closed elsewhere.
    """

    def __init__(
        self,
        specs: Iterable[WorkerSpec],
        apply: Callable[[CacheTold], object],
        known: Callable[[str], bool],
        clock: Callable[[], float],
        sockets: SocketReader,
    ) -> None:
        self.received = 0
        self.broken = 0  # messages that are no batch of events
        self._specs = {spec.id: spec for spec in specs}
        self._apply = apply
        self._known = known
        self._clock = clock
        self._sockets = sockets
        self._engines: dict[str, _Engine] = {}
        self._context: zmq.Context[Socket] | None = None

    def start(self) -> None:
        """Connect to all; call it on the event loop."""
        self._context = new_context()
        for spec in self._specs.values():
            self._open(spec, self._context)

    def join(self, spec: WorkerSpec) -> None:
        self._specs[spec.id] = spec
        if self._context is not None:
            self._open(spec, self._context)

    def leave(self, worker_id: str) -> None:
        self._specs.pop(worker_id, None)
        engine = self._engines.pop(worker_id, None)
        for socket in engine.sockets if engine is not None else ():
            self._sockets.forget(socket)
            socket.close(linger=0)

    def close(self) -> None:
        """Call it after the reader of sockets was closed."""
        if self._context is not None:
            self._context.destroy(linger=0)
        self._engines.clear()

    def _open(self, spec: WorkerSpec, context: zmq.Context[Socket]) -> None:
        if spec.kv_events is None:
            return
        published = self._socket(context, zmq.SUB, spec.kv_events)
        published.setsockopt(zmq.SUBSCRIBE, b"")
        replay = None
        if spec.kv_replay is not None:
            replay = self._socket(context, zmq.DEALER, spec.kv_replay)
        engine = self._engines[spec.id] = _Engine(spec, published, replay)
        for socket in engine.sockets:
            take = partial(self._take, engine, socket is replay)
            self._sockets.watch(socket, one_by_one(socket, take))
        self._ask(engine)

    def _socket(self, context: zmq.Context[Socket], kind: int, endpoint: str) -> Socket:
        socket = new_socket(context, kind, {})
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise ConfigError(f"KV events {endpoint!r}: {error}") from error
        return socket

    def _take(self, engine: _Engine, repeated: bool, frames: list[bytes]) -> None:
        try:
            for snapshot in self._heard(engine, frames, repeated=repeated):
                engine.told = True
                self._apply(CacheTold(engine.worker_id, snapshot, self._clock()))
        except Exception as error:  # noqa: BLE001 - it must not break a round
            self.broken += 1
            if not engine.complained:
                engine.complained = True
                log.warning("%s: %s", engine.worker_id, error)
        self._ask(engine)

    def _heard(self, engine: _Engine, frames: list[bytes], *, repeated: bool) -> Iterator[Snapshot]:
        stream = engine.stream
        if len(frames) < 3 or len(frames[-2]) != _NUMBER_BYTES:
            raise SnapshotError("no message of KV events")
        ends, old = frames[-2] == _END, engine.asked_of != stream.starts
        if repeated and (ends or old):
            engine.asked_s = None if ends else engine.asked_s
            if not old:  # else it was asked before it began anew
                yield from stream.complete()
            return
        number, events = int.from_bytes(frames[-2], "big"), decode_events(frames[-1])
        self.received += 1
        if engine.told and not self._known(engine.worker_id):
            engine.told = False
            stream.begin()
        if repeated:
            yield from stream.repeated(number, events)
            return
        yield from stream.published(number, events)
        if engine.asked_s is not None:
            now_s = self._clock()
            engine.asked_s = min(engine.asked_s, now_s)
            if now_s - engine.asked_s > _PATIENCE_S:
                engine.asked_s = None
                if engine.asked_of == stream.starts:
                    yield from stream.complete()

    def _ask(self, engine: _Engine) -> None:
        missing = engine.stream.missing
        if missing is None or engine.asked_s is not None or engine.replay is None:
            return
        engine.asked_s, engine.asked_of = math.inf, engine.stream.starts
        try:
            engine.replay.send_multipart((b"", missing.to_bytes(_NUMBER_BYTES, "big")), zmq.NOBLOCK)
        except zmq.Again:  # requests are queued already
            return
        self._sockets.read_soon(engine.replay)
