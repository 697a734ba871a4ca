"""The router before two real vLLM engines with the plug-in, one of which dies and comes back."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

from router.core.state.feed import Feed
from router.core.types import Snapshot
from router.core.wire import decode, request_token
from tests.support.engine import READY_S, Installation, metric, starting_engine
from tests.support.engine_python import ROOT
from tests.support.server import Server, free_port, running_router, wait_ready, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

SLOTS = 8
CLIENTS = 24
PROMPT = [9] * 20
WAIT_S = 60


@dataclass
class Stream:
    """All that one engine publishes, read in a thread; and what it comes to, message by message."""

    endpoint: str
    snapshots: list[Snapshot] = field(default_factory=list)

    def read(self, stop: threading.Event) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.SUB)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(self.endpoint)
        while not stop.is_set():
            if socket.poll(100):
                self.snapshots.append(decode(socket.recv()))
        context.destroy(linger=0)

    def loads(self, epoch: str) -> Mapping[tuple[int, int], int]:
        """By message of one of its lives and requests running then: the engine's KV tokens."""
        feed, loads = Feed(), {}
        for snapshot in [one for one in self.snapshots if one.epoch == epoch]:
            feed.apply(snapshot, 0.0)
            loads[snapshot.sequence, feed.running] = feed.load_tokens
        return loads

    @property
    def epochs(self) -> list[str]:
        return list(dict.fromkeys(one.epoch for one in self.snapshots))

    @property
    def ids(self) -> set[str]:
        shown = {row.id for one in self.snapshots for row in one.running}
        return shown | {id_ for one in self.snapshots for id_ in one.finished}


@dataclass
class Pair:
    """Two engines, by rank of their being started, and their streams."""

    where: Installation
    folder: Path
    stack: contextlib.ExitStack
    ports: tuple[int, int]
    streams: tuple[Stream, Stream]
    servers: list[Server] = field(default_factory=list)

    def start(self, index: int) -> Server:
        """Start an engine on its port, without waiting for it."""
        config = json.dumps({"evenstep": {"snapshots": self.streams[index].endpoint}})
        folder = self.folder / f"life-{len(self.servers)}"
        folder.mkdir()
        server = self.stack.enter_context(
            starting_engine(
                self.where,
                folder,
                *("--scheduler-cls", "engine_patches.scheduler.EvenstepScheduler"),
                *("--additional-config", config, "--max-num-seqs", str(SLOTS)),
                environment={"PYTHONPATH": str(ROOT)},
                port=self.ports[index],
            )
        )
        self.servers.append(server)
        return server

    def worker(self, index: int) -> str:
        return f"http://127.0.0.1:{self.ports[index]},snapshots={self.streams[index].endpoint}"


@pytest.fixture(scope="module")
def pair(
    engine_installation: Installation, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    stop = threading.Event()
    streams = Stream(f"tcp://127.0.0.1:{free_port(2)}"), Stream(f"tcp://127.0.0.1:{free_port(2)}")
    readers = [threading.Thread(target=stream.read, args=(stop,)) for stream in streams]
    with contextlib.ExitStack() as stack:
        folder = tmp_path_factory.mktemp("pair")
        ports = (free_port(), free_port())
        pair = Pair(engine_installation, folder, stack, ports, streams)
        for reader in readers:
            reader.start()
            stack.callback(reader.join)
        stack.callback(stop.set)
        for server in [pair.start(index) for index in (0, 1)]:
            wait_ready(server, READY_S)
        yield pair


@pytest.fixture(scope="module")
def router(pair: Pair) -> Iterator[Server]:
    workers = [part for index in (0, 1) for part in ("--worker", pair.worker(index))]
    flags = [*("--policy", "least_tokens", "--queue-timeout", "300")]
    flags += ("--health-interval", "0.2", "--health-timeout", "30", "--connect-timeout", "30")
    with running_router(pair.folder, *workers, *flags) as server:
        wait_until(lambda: sources(server) == ["snapshots"] * 2, WAIT_S, "both are known")
        yield server


def workers_of(router: Server) -> list[dict[str, Any]]:
    workers: list[dict[str, Any]] = router.get("/health").json()["groups"]["default"]["workers"]
    return workers


def sources(router: Server) -> list[str]:
    return [worker["state_source"] if worker["up"] else "down" for worker in workers_of(router)]


@dataclass(frozen=True)
class Answer:
    """What a client saw of its stream."""

    status: int
    events: list[dict[str, Any]]
    done: bool

    @property
    def errors(self) -> int:
        return sum("error" in event for event in self.events)

    @property
    def token(self) -> str:
        return str(request_token(self.events[0]["id"]))


def ask(router: Server, begun: Callable[[int], object] = id, **fields: Any) -> Answer:
    """Read a stream whole; ``begun`` is told +1 at its first byte and -1 when it has ended."""
    body = {"model": "tiny", "prompt": PROMPT, "stream": True, "ignore_eos": True, **fields}
    url = f"{router.url}/v1/completions"
    content = b""
    with httpx.stream("POST", url, json=body, timeout=4 * WAIT_S) as told:
        for chunk in told.iter_raw():
            if not content:
                begun(1)
            content += chunk
    begun(-1)
    # Random tokens make all that Unicode calls line ends.
    lines = content.split(b"\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    return Answer(told.status_code, events, b"data: [DONE]" in lines)


class Sampler:
    """What the router shows of both workers, again and again."""

    def __init__(self, router: Server) -> None:
        self._router = router
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.samples: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])

    def _look(self) -> None:
        with httpx.Client(base_url=self._router.url, timeout=WAIT_S) as client:
            while not self._stop.wait(0.02):
                try:
                    groups = client.get("/health").json()["groups"]
                except httpx.TransportError:
                    continue  # the machine is busy: one sample less
                for samples, worker in zip(self.samples, groups["default"]["workers"], strict=True):
                    samples.append(worker)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def excesses(
    samples: list[dict[str, Any]], loads: Mapping[tuple[int, int], int]
) -> list[tuple[int, int]]:
    """By how much the router's load was above the engine's after the same message; and in flight.

    Left out are moments in which the router knew an answer to be complete before the engine said
    so. What is on its way is counted by the router, and not yet by the engine.
    """
    moments = [(one["snapshot_sequence"], one["running"]) for one in samples]
    return [
        (sample["load_tokens"] - loads[moment], sample["in_flight"])
        for sample, moment in zip(samples, moments, strict=True)
        if sample["up"] and moment in loads
    ]


def test_ids_and_loads_are_the_engines(pair: Pair, router: Server) -> None:
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"n": 2},
        {"prompt": [PROMPT, PROMPT[:7], PROMPT[:5]]},
        {"prompt": "even steps, odd ones"},
    )
    before = [len(stream.snapshots) for stream in pair.streams]
    answers: list[Answer] = []

    def moments() -> list[list[tuple[int, int]]]:
        sampled = zip(sampler.samples, pair.streams, strict=True)
        return [
            excesses(list(samples), stream.loads(stream.epochs[0])) for samples, stream in sampled
        ]

    def all_shown() -> bool:
        """Ask all once more; has each engine then shown all that the router had sent there?"""
        answers.extend(pool.map(lambda kind: ask(router, max_tokens=600, **kind), kinds))
        return all(any(not more and sent for more, sent in above) for above in moments())

    with Sampler(router) as sampler, ThreadPoolExecutor(len(kinds)) as pool:
        wait_until(all_shown, 2 * WAIT_S, "all that is sent is shown at some moment")
    assert all(answer.done and not answer.errors for answer in answers)

    tokens = sorted(answer.token for answer in answers for _ in range(_parts(answer)))

    def all_told() -> bool:
        later = zip(pair.streams, before, strict=True)
        told = [one for stream, first in later for one in stream.snapshots[first:]]
        return sorted(str(request_token(id_)) for one in told for id_ in one.finished) == tokens

    wait_until(all_told, WAIT_S, "every end is told")
    assert all(more >= 0 for above in moments() for more, _ in above)


def test_a_request_of_any_endpoint_is_known_by_the_routers_token(
    pair: Pair, router: Server
) -> None:
    """Whatever its client calls it; of a response, the engine reads that in the body alone."""
    forged = "es-" + "0" * 20
    said = {"messages": [{"role": "user", "content": "even steps"}], "max_tokens": 40}
    bodies: Mapping[str, Mapping[str, Any]] = {
        "/v1/responses": {"input": "a", "max_output_tokens": 40, "request_id": f"resp_{forged}"},
        "/v1/messages": said,
        "/v1/chat/completions": said,
    }
    before = [len(stream.snapshots) for stream in pair.streams]

    answers = [
        httpx.post(
            router.url + path,
            json={"model": "tiny", **body},
            headers={"X-Request-Id": forged},
            timeout=WAIT_S,
        )
        for path, body in bodies.items()
    ]

    tokens = {str(request_token(answer.json()["id"])) for answer in answers}
    assert len(tokens - {forged}) == len(bodies)
    assert {answer.headers["x-request-id"] for answer in answers} == {forged}

    def told() -> set[str]:
        later = zip(pair.streams, before, strict=True)
        ids = [
            id_
            for stream, first in later
            for one in stream.snapshots[first:]
            for id_ in one.finished
        ]
        return {str(request_token(id_)) for id_ in ids}

    wait_until(lambda: told() >= tokens, WAIT_S, "every end is told")
    assert told() == tokens


def _parts(answer: Answer) -> int:
    return 1 + max(int(event["choices"][0]["index"]) for event in answer.events)


def test_what_a_token_is_is_learned(router: Server) -> None:
    """The tiny model's tokenizer has a token for each letter; four bytes a token are assumed."""
    before = metric(router, "evenstep_bytes_per_token")
    assert abs(before - 1) > 0.1
    sizes = itertools.cycle(range(100, 400, 10))

    def learned() -> bool:
        """One that has ended when the engine tells of it teaches nothing."""
        ask(router, prompt=("even steps, odd ones" * 20)[: next(sizes)], max_tokens=2)
        return abs(metric(router, "evenstep_bytes_per_token") - 1) < 0.1

    wait_until(learned, WAIT_S, "a token is known to be a byte")


@pytest.mark.slow
def test_an_engine_is_killed_and_comes_back_under_load(pair: Pair, router: Server) -> None:
    stop = threading.Event()
    changes: list[int] = []

    def client(_: int) -> list[Answer]:
        answers = []
        while not stop.is_set():
            answers.append(ask(router, changes.append, max_tokens=100))
        return answers

    with Sampler(router) as sampler, ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(client, number) for number in range(CLIENTS)]
        try:
            # More streams than one engine has slots: the other has begun some too.
            wait_until(lambda: sum(changes) > SLOTS, WAIT_S, "both engines answer")
            _look_on(sampler)
            wait_until(lambda: _amid_streams(router), WAIT_S, "the engine's streams have begun")
            _kill(pair.servers[0])
            wait_until(lambda: sources(router)[0] == "down", WAIT_S, "the router sees it")
            wait_ready(pair.start(0), READY_S)
            wait_until(_busy(router), WAIT_S, "both engines are busy again")
            _look_on(sampler)
        finally:
            stop.set()
        answers = [answer for one in clients for answer in one.result(timeout=2 * WAIT_S)]

    broken = [answer for answer in answers if not answer.done]
    assert {answer.status for answer in answers} == {200}
    assert 0 < len(broken) <= SLOTS
    assert all(answer.errors == 0 for answer in answers if answer.done)
    assert [answer.errors for answer in broken] == [1] * len(broken)
    assert all("error" in answer.events[-1] and len(answer.events) > 1 for answer in broken)
    _check_ids(pair, answers)
    _check_loads(pair, sampler)
    wait_until(_idle(router), WAIT_S, "nothing is left")


def _look_on(sampler: Sampler, times: int = 100) -> None:
    """Go on until the router's state has been seen so many times more."""
    enough = len(sampler.samples[0]) + times
    wait_until(lambda: len(sampler.samples[0]) >= enough, 2 * WAIT_S, "the state is looked at")


def _amid_streams(router: Server) -> bool:
    """The first engine runs all that it was sent, and the clients have tokens of each."""
    worker = workers_of(router)[0]
    running, sent, load_tokens = (worker[key] for key in ("running", "in_flight", "load_tokens"))
    return bool(running == sent and load_tokens > running * (len(PROMPT) + 10) > 0)


def _kill(server: Server) -> None:
    os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait(timeout=WAIT_S)


def _busy(router: Server) -> Callable[[], bool]:
    return lambda: min(worker["in_flight"] for worker in workers_of(router)) > SLOTS // 2


def _idle(router: Server) -> Callable[[], bool]:
    def idle() -> bool:
        return all(
            (worker["free_slots"], worker["in_flight"], worker["load_tokens"]) == (SLOTS, 0, 0)
            for worker in workers_of(router)
        )

    return idle


def _check_ids(pair: Pair, answers: list[Answer]) -> None:
    """Each answer's token was shown by an engine, and all that the engines ran was the router's."""
    shown = {request_token(id_) for stream in pair.streams for id_ in stream.ids}
    assert None not in shown
    assert {answer.token for answer in answers} <= shown


def _check_loads(pair: Pair, sampler: Sampler) -> None:
    """After each message the engine's load and whole prompts on their way, in its new life too."""
    revived = pair.streams[0]
    first, second = revived.epochs
    downs = [index for index, sample in enumerate(sampler.samples[0]) if not sample["up"]]
    for samples, loads in (
        (sampler.samples[1], pair.streams[1].loads(pair.streams[1].epochs[0])),
        (sampler.samples[0][: downs[0]], revived.loads(first)),
        (sampler.samples[0][downs[-1] + 1 :], revived.loads(second)),
    ):
        above = excesses(samples, loads)
        assert len(above) > 10
        assert any(not more and in_flight for more, in_flight in above)
        for more, in_flight in above:
            assert more % len(PROMPT) == 0
            assert 0 <= more <= in_flight * len(PROMPT)
