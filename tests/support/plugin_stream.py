"""An engine's reporter without vLLM, and the sockets of those who read its stream."""

from typing import Any

import zmq

from engine_patches.plugin.compat import EngineView
from engine_patches.plugin.reporter import Reporter
from engine_patches.plugin.settings import Settings
from router.core.types import Snapshot
from router.core.wire import decode, full_endpoint
from tests.support.plugin_engine import FakeScheduler, Request

WAIT_S = 60

_Socket = zmq.Socket[bytes]


class Routers:
    """Sockets of those who read, or try to."""

    def __init__(self) -> None:
        self._context: zmq.Context[_Socket] = zmq.Context()
        self._sockets: list[_Socket] = []

    def connect(self, kind: int, endpoint: str, keys: tuple[bytes, ...] = ()) -> _Socket:
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, WAIT_S * 1000)
        if keys:
            socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = keys
        if kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(endpoint)
        return socket

    def subscribed(self, endpoint: str, keys: tuple[bytes, ...] = ()) -> _Socket:
        """A subscriber that has got its first message, a heartbeat."""
        stream = self.connect(zmq.SUB, endpoint, keys)
        assert decode(stream.recv()).running == ()
        return stream

    def asker(self, endpoint: str, keys: tuple[bytes, ...] = ()) -> _Socket:
        return self.connect(zmq.DEALER, full_endpoint(endpoint), keys)

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()
        self._context.term()


class Engine(FakeScheduler):
    """A scheduler and its reporter, called as the plug-in calls it."""

    def __init__(self, settings: Settings, **config: Any) -> None:
        super().__init__(**config)
        self.now_s = 0.0
        self.reporter = Reporter(EngineView(self), settings, clock=lambda: self.now_s)

    def add_request(self, request: Request) -> None:
        self.reporter.arrives(request)
        super().add_request(request)
        self.reporter.arrived(request)

    def step(self, finish: set[str] | None = None, preempt: set[str] | None = None) -> None:
        output = self.schedule(preempt=preempt or set())
        self.reporter.scheduled(output, self.now_s)
        self.now_s += 0.5
        results = self.update_from_output(output, finish or set())
        self.reporter.stepped(results, output)


def ask_full(dealer: _Socket) -> Snapshot:
    dealer.send(b"")
    return decode(dealer.recv())
