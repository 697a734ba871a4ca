"""ZMQ sockets on the event loop, read several messages at a time.

The loop watches one epoll of all their descriptors. A wake-up costs more than a message, futures of
``zmq.asyncio`` more still. So messages are batched: reading is delayed by a millisecond while
requests wait, by more otherwise. A decision in between reads first.

ZMQ signals a descriptor once, not per message, and any call on a socket may consume the signal. So
sockets are read until empty, and again after any other call.
"""

import asyncio
import math
import select
from collections.abc import Callable, Mapping

import zmq

from router.core.wire import MOST_BYTES
from router.engines.curve_keys import KeyPair

# Reads per socket before other callbacks run.
_TURNS = 16
_PAUSE_S = 0.001
# Divided among the sockets: about sixteen messages arrive in a pause, half a millisecond of work.
_LONG_PAUSE_S = 0.32
_LONGEST_PAUSE_S = 0.05

# Of a context. At most four per worker: two sockets, and two for a monitor.
_MAX_SOCKETS = 32_768
LARGEST_BYTES = 4 * MOST_BYTES
_OPTIONS: Mapping[int, int] = {
    zmq.LINGER: 0,
    zmq.IPV6: 1,
    zmq.RECONNECT_IVL: 100,
    zmq.RECONNECT_IVL_MAX: 1000,
    zmq.MAXMSGSIZE: LARGEST_BYTES,
    # No ZMQ heartbeats: they abort the process if a full queue is read late ("Assertion failed:
    # _input_stopped"). After a silence the router reconnects.
}

Socket = zmq.Socket[bytes]
Reader = Callable[[], bool]


def new_context() -> zmq.Context[Socket]:
    """For the sockets of all workers."""
    context: zmq.Context[Socket] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
    return context


def new_socket(
    context: zmq.Context[Socket],
    kind: int,
    options: Mapping[int, int | bytes],
    keys: KeyPair | None = None,
    server_key: str | None = None,
) -> Socket:
    """A socket to engines; with both keys it is encrypted."""
    socket = context.socket(kind)
    for option, value in {**_OPTIONS, **options}.items():
        socket.setsockopt(option, value)
    if keys is not None and server_key is not None:
        keys.secure(socket, server_key)
    return socket


def one_by_one(socket: Socket, take: Callable[[list[bytes]], None]) -> Reader:
    """A reader that takes a message's frames at a time."""

    def read() -> bool:
        if socket.closed:
            return False
        try:
            frames = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        take(frames)
        return True

    return read


class SocketReader:
    """Calls the readers of sockets that have messages; ``awaited``: whether requests wait."""

    def __init__(self, clock: Callable[[], float], awaited: Callable[[], bool]) -> None:
        self._clock = clock
        self._awaited = awaited
        self._readable = select.epoll()
        self._readers: dict[int, Reader] = {}
        self._read_s = -math.inf
        self._pause: asyncio.TimerHandle | None = None

    def watch(self, socket: Socket, read: Reader) -> None:
        """``read`` returns whether there may be more messages."""
        fd = socket.fileno()
        self._readers[fd] = read
        self._readable.register(fd, select.EPOLLIN)
        self.read_soon(socket)

    def forget(self, socket: Socket) -> None:
        fd = socket.fileno()
        self._readable.unregister(fd)
        del self._readers[fd]

    def start(self) -> None:
        asyncio.get_running_loop().add_reader(self._readable, self._wake)

    def close(self) -> None:
        self._readers.clear()
        if self._pause is not None:
            self._pause.cancel()
        if not self._readable.closed:
            asyncio.get_running_loop().remove_reader(self._readable)
            self._readable.close()

    def read(self) -> None:
        """Before a decision; at most once a millisecond."""
        # Without sockets there is nothing to read, as after the end.
        if self._readers and self._clock() - self._read_s >= _PAUSE_S:
            self._take_turns(self._ready())

    def read_soon(self, socket: Socket) -> None:
        """Its signal may have been consumed."""
        asyncio.get_running_loop().call_soon(self._take_turns, [self._readers[socket.fileno()]])

    def hasten(self) -> None:
        """Requests now wait."""
        until_s = asyncio.get_running_loop().time() + _PAUSE_S
        if self._pause is not None and self._pause.when() > until_s:
            self._pause.cancel()
            self._rest(_PAUSE_S)

    def _wake(self) -> None:
        asyncio.get_running_loop().remove_reader(self._readable)
        self._go_on()

    def _go_on(self) -> None:
        ready = self._ready()
        if not ready:
            self._pause = None
            self.start()
        elif self._awaited():
            self._rest(_PAUSE_S)
        else:
            share_s = _LONG_PAUSE_S / len(self._readers)
            self._rest(min(_LONGEST_PAUSE_S, max(_PAUSE_S, share_s)))
        self._take_turns(ready)

    def _rest(self, pause_s: float) -> None:
        self._pause = asyncio.get_running_loop().call_later(pause_s, self._go_on)

    def _ready(self) -> list[Reader]:
        self._read_s = self._clock()
        return [self._readers[fd] for fd, _ in self._readable.poll(0)]

    def _take_turns(self, readers: list[Reader]) -> None:
        for _ in range(_TURNS):
            if not readers:
                return
            readers = [read for read in readers if read()]
        asyncio.get_running_loop().call_soon(self._take_turns, readers)
