"""A router that stops reading for a minute, in front of a real vLLM under load."""

import contextlib
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import zmq

from engine_patches.stream.publisher import UNREAD_MESSAGES
from router.core.state.feed import Feed
from router.core.types import Snapshot
from router.core.wire import decode, full_endpoint
from tests.support.engine import MODEL, Installation, running_engine
from tests.support.engine_python import ROOT
from tests.support.server import Server, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

UNREAD_S = 60.0
WAIT_S = 60.0
CLIENTS = 10


@dataclass
class Router:
    """A subscriber that may pause; a short queue, so that its pause reaches the engine soon."""

    endpoint: str
    context: zmq.Context[zmq.Socket[bytes]] = field(default_factory=zmq.Context)
    feed: Feed = field(default_factory=Feed)
    steps_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stream = self.context.socket(zmq.SUB)
        self.stream.setsockopt(zmq.RCVHWM, 10)
        self.stream.setsockopt(zmq.SUBSCRIBE, b"")
        self.stream.connect(self.endpoint)
        self.dealer = self.context.socket(zmq.DEALER)
        self.dealer.connect(full_endpoint(self.endpoint))

    def read(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            if self.stream.poll(100):
                self._take(decode(self.stream.recv()))

    def ask(self) -> None:
        self.dealer.send(b"")
        assert self.dealer.poll(int(WAIT_S * 1e3))
        self._take(decode(self.dealer.recv()))

    def close(self) -> None:
        self.context.destroy(linger=0)

    def _take(self, snapshot: Snapshot) -> None:
        self.feed.apply(snapshot, 0.0)
        if snapshot.step_s:
            self.steps_s.append(snapshot.step_s)


@pytest.fixture
def engine(engine_installation: Installation, tmp_path: Path) -> Iterator[tuple[Server, str]]:
    flags = ("--scheduler-cls", "engine_patches.scheduler.EvenstepScheduler")
    with (
        # The path of a socket must be short.
        tempfile.TemporaryDirectory(prefix="evenstep-") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("PYTHONPATH", str(ROOT))
        # TCP's own buffers would take a minute's messages.
        endpoint = f"ipc://{folder}/s"
        config = json.dumps({"evenstep": {"snapshots": endpoint}})
        with running_engine(
            engine_installation, tmp_path, *flags, "--additional-config", config
        ) as server:
            yield server, endpoint


@contextlib.contextmanager
def load(server: Server) -> Iterator[None]:
    """Keep the engine busy."""
    stop = threading.Event()

    def client() -> None:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 100, "ignore_eos": True}
        while not stop.is_set():
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=WAIT_S)

    clients = [threading.Thread(target=client) for _ in range(CLIENTS)]
    for one in clients:
        one.start()
    try:
        yield
    finally:
        stop.set()
        for one in clients:
            one.join()


def core_rss_bytes(server: Server) -> int:
    """Resident memory of the process that schedules."""
    pid = server.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    rss = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in children]
    return max(rss) * os.sysconf("SC_PAGESIZE")


def test_a_router_that_does_not_read_for_a_minute(engine: tuple[Server, str]) -> None:
    server, endpoint = engine
    witness, sleeper = Router(endpoint), Router(endpoint)
    with load(server):
        sleeper.read(5)
        witness.ask()
        witness.read(10)
        sleeper.ask()
        before_s, rss = statistics.median(witness.steps_s), core_rss_bytes(server)
        witness.steps_s.clear()
        witness.read(UNREAD_S)
        # An engine that waited for the sleeper would never send so many; a slow one takes longer.
        while witness.feed.sequence - sleeper.feed.sequence < 3 * UNREAD_MESSAGES:
            witness.read(5)
        during_s, grown = statistics.median(witness.steps_s), core_rss_bytes(server) - rss
        assert grown < 50e6
        wait_until(lambda: misses(sleeper), WAIT_S, "the sleeper sees that it missed something")
        missed = sleeper.feed.gaps
        assert missed > 0
        sleeper.ask()
        assert not sleeper.feed.full_wanted
        sleeper.read(2)
        assert not sleeper.feed.full_wanted
    print(f"median step {before_s * 1e3:.2f} ms, then {during_s * 1e3:.2f} ms")  # noqa: T201
    print(f"{missed} messages missed, memory {grown / 1e6:+.1f} MB")  # noqa: T201
    wait_until(lambda: rests(sleeper), WAIT_S, "the sleeper knows that the engine rests")
    assert sleeper.feed.load_tokens == 0
    witness.close()
    sleeper.close()


def misses(router: Router) -> bool:
    router.read(0.5)
    return router.feed.full_wanted


def rests(router: Router) -> bool:
    router.read(0.5)
    if router.feed.full_wanted:
        router.ask()
    return router.feed.running == 0 and not router.feed.full_wanted
