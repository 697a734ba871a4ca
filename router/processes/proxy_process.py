"""A proxy of ``evenstep serve --processes N``: connections to clients and engines, nothing else.

It imports neither numba, numpy nor FastAPI: only the deciding process needs them.
"""

import asyncio
import contextlib
import gc
import logging
import socket
import sys
import time
from collections.abc import AsyncIterator
from functools import partial

from starlette.routing import Router
from starlette.types import ASGIApp

from router import systemd
from router.access.door import Door
from router.access.key_ring import KeyRing
from router.engines.http_client import HttpClient
from router.file_limit import allow_connections
from router.http import tls
from router.http.listening import server_config
from router.http.port import Lifecycle
from router.http.refusal import HttpCounts
from router.logs import start_logging
from router.processes import messages as m
from router.processes.directory import Directory
from router.processes.forward import Forward, Whole
from router.processes.peer import Frames
from router.processes.process_args import Place, end_with_supervisor, orphaned, place_of
from router.processes.proxy_counters import Tallies
from router.processes.reconnect import Dial
from router.processes.remote_dispatcher import Hearing, RemoteDispatcher
from router.proxy.asgi_client import Identified
from router.proxy.context import RelayContext
from router.proxy.model_tokenizer import tokenizer_of
from router.proxy.request_log import RequestLog
from router.proxy.splice import HotPath
from router.serve.main_server import MainServer

log = logging.getLogger(__name__)

_AGAIN_S = 0.05
_PATIENCE_S = 1.0


class _Keys:
    """Client keys last received."""

    ring = KeyRing()


class Proxy:
    """Every part of a proxy; implements ``ServingContext``.

    ``hot`` takes over the requests that need no other process; ``elsewhere``, the deciding process,
    serves split and metered ones.
    """

    def __init__(self, place: Place, directory: Directory) -> None:
        serving = directory.serving
        self.clock = clock = time.monotonic
        self.models, self._serving = directory, serving
        self.counts = HttpCounts()
        requests, tallies = RequestLog(clock), Tallies(self.counts)
        seat = place.slot, place.restarts
        self._dispatcher = RemoteDispatcher(clock, tallies, requests, seat, directory)
        self.lifecycle = Lifecycle(serving.ending)
        self.tls = None if serving.tls is None else tls.server_context(*serving.tls)
        self._engines = HttpClient(serving.connect_timeout_s, serving.worker_key)
        self._inside = HttpClient(socket=place.http)
        self.relay = RelayContext(
            port=self._dispatcher,
            client=self._engines,
            trouble=self._dispatcher.trouble,
            ranked=directory.ranked,
            settings=directory.patience.relay,
            clock=clock,
        )
        self._keys = _Keys()
        keys = None if directory.access.keys is None else self._keys
        self.door = Door(keys, tallies, clock) if directory.access.hidden else None
        self.elsewhere = partial(Whole, self._inside, self._dispatcher)
        self.hot = HotPath(self, requests)
        attempts = self.relay.attempts
        self._dispatcher.hearing = Hearing(self.learn, attempts.end, tls.refusal)
        self._dial = Dial(place.decider, self._dispatcher, tallies)
        self.learn(directory)
        for folder in directory.tokenizers.values():  # before the first request needs it
            tokenizer_of(folder)

    @property
    def app(self) -> ASGIApp:
        forward = Forward(self._inside, self._dispatcher)
        return Router(
            default=Identified(forward), lifespan=lambda _: self.running(), redirect_slashes=False
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        end_with_supervisor()
        dialing = asyncio.create_task(self._dial.run())
        gc.freeze()
        yield
        dialing.cancel()
        await asyncio.wait((dialing,))
        for client in (self._engines, self._inside):
            await client.aclose()

    def learn(self, directory: Directory) -> None:
        """Apply a new directory, or nothing; ConfigError: the certificate is unusable."""
        before, serving = self._serving, directory.serving
        if self.tls is not None and serving.tls is not None and serving.tls != before.tls:
            tls.load(self.tls, *serving.tls)
        self._serving = serving
        self._dispatcher.learn(directory)
        self.models = directory
        self._keys.ring = KeyRing(directory.access.keys or ())
        self.relay.ranked = directory.ranked
        self.relay.settings = directory.patience.relay
        self.lifecycle.settings = serving.ending
        logged = serving.log_level, serving.log_format
        if logged != (before.log_level, before.log_format):
            start_logging(*logged)


def run(place: Place) -> None:
    """Relay requests and answers until SIGTERM."""
    assert place.listener is not None
    systemd.hold_hangups()  # for good: directories bring a proxy its settings
    directory = _first_directory(place.decider)
    serving = directory.serving
    start_logging(serving.log_level, serving.log_format)
    allow_connections(serving.limits.max_connections)
    proxy = Proxy(place, directory)
    config = server_config(
        proxy.app, serving.limits, counts=proxy.counts, hot=proxy.hot, tls=proxy.tls
    )
    with socket.socket(fileno=place.listener) as listener:
        server = MainServer(config, proxy.lifecycle, inherited=place.inherited)
        server.run(sockets=[listener])


def _first_directory(path: str) -> Directory:
    while True:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(_PATIENCE_S)
            asking.connect(path)
            frames = Frames()
            while data := asking.recv(65_536):
                for frame in frames.feed(data):
                    message = m.from_decider.decode(frame)
                    if isinstance(message, m.Told):
                        return message.directory
        if orphaned():
            raise SystemExit(1)
        time.sleep(_AGAIN_S)


if __name__ == "__main__":
    run(place_of(sys.argv[1]))
