"""ZMQ sockets on the event loop: what comes is read several messages at a time.

Their file descriptors are watched together, by one epoll that the event loop watches. Waking up
costs more than a message does, and futures of ``zmq.asyncio`` would cost more still: so what comes
is read some time later, together with what has come by then. That is a millisecond while requests
wait for it, more while none do; who decides something meanwhile has it read first.

ZMQ signals a descriptor once, not per message, and any call on a socket may eat the signal: so
sockets are read until they are empty, and after whatever else was done with them.
"""

from __future__ import annotations

import asyncio
import math
import select
from collections.abc import Callable

import zmq

# Of each socket before others on the loop have theirs: else nobody had any while a backlog is read.
_TURNS = 16
_PAUSE_S = 0.001
# Divided among the sockets, of which most are a worker's: so some sixteen messages come meanwhile,
# which take half a millisecond.
_LONG_PAUSE_S = 0.32
_LONGEST_PAUSE_S = 0.05

Socket = zmq.Socket[bytes]
Reader = Callable[[], bool]


class SocketReader:
    """Has sockets read when something has come.

    Args:
        clock: seconds, monotonic.
        awaited: whether requests wait for what comes.
    """

    def __init__(self, clock: Callable[[], float], awaited: Callable[[], bool]) -> None:
        self._clock = clock
        self._awaited = awaited
        self._readable = select.epoll()
        self._readers: dict[int, Reader] = {}
        self._read_s = -math.inf
        self._pause: asyncio.TimerHandle | None = None

    def watch(self, socket: Socket, read: Reader) -> None:
        """One more socket; ``read`` takes in a message or some, and tells if there may be more."""
        fd = socket.fileno()
        self._readers[fd] = read
        self._readable.register(fd, select.EPOLLIN)
        self.read_soon(socket)

    def forget(self, socket: Socket) -> None:
        """One less, which is still open."""
        fd = socket.fileno()
        self._readable.unregister(fd)
        del self._readers[fd]

    def start(self) -> None:
        """Read from now on; call it on the event loop."""
        asyncio.get_running_loop().add_reader(self._readable, self._wake)

    def close(self) -> None:
        """Read no more."""
        self._readers.clear()
        if self._pause is not None:
            self._pause.cancel()
        if not self._readable.closed:
            asyncio.get_running_loop().remove_reader(self._readable)
            self._readable.close()

    def read(self) -> None:
        """Read what has come, now; no-op within a millisecond of the last time."""
        if not self._readable.closed and self._clock() - self._read_s >= _PAUSE_S:
            self._take_turns(self._ready())

    def read_soon(self, socket: Socket) -> None:
        """Read a socket at the loop's next turn: a signal may have been eaten."""
        asyncio.get_running_loop().call_soon(self._take_turns, [self._readers[socket.fileno()]])

    def hasten(self) -> None:
        """Requests wait from now on: make it a short pause."""
        until_s = asyncio.get_running_loop().time() + _PAUSE_S
        if self._pause is not None and self._pause.when() > until_s:
            self._pause.cancel()
            self._rest(_PAUSE_S)

    def _wake(self) -> None:
        """Something comes after a silence."""
        asyncio.get_running_loop().remove_reader(self._readable)
        self._go_on()

    def _go_on(self) -> None:
        """Read what has come, and after a pause what comes next; if nothing has, wait for it."""
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
        """Of all sockets that have something."""
        self._read_s = self._clock()
        return [self._readers[fd] for fd, _ in self._readable.poll(0)]

    def _take_turns(self, readers: list[Reader]) -> None:
        """Each socket has its turn until all are empty, with breaks for others on the loop."""
        for _ in range(_TURNS):
            if not readers:
                return
            readers = [read for read in readers if read()]
        asyncio.get_running_loop().call_soon(self._take_turns, readers)
