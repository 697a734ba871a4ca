"""A real vLLM with the plug-in, its snapshots, and beside them what vLLM counts itself."""

import contextlib
import json
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

from router.core.state.feed import Feed
from router.core.types import Snapshot
from router.core.wire import decode
from tests.support.core import token
from tests.support.engine import MODEL, Installation, running_engine
from tests.support.engine_python import ROOT
from tests.support.engine_stat_log_entry import install
from tests.support.server import Server, free_port, wait_until

WAIT_S = 60


@dataclass
class Stream:
    """Every snapshot since a subscriber joined, read in a thread."""

    snapshots: list[Snapshot] = field(default_factory=list)

    def read(self, endpoint: str, stop: threading.Event) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.SUB)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(endpoint)
        while not stop.is_set():
            if socket.poll(100):
                self.snapshots.append(decode(socket.recv()))
        socket.close(0)
        context.term()


@dataclass(frozen=True)
class Watched:
    """An engine, its snapshots and its own counts."""

    server: Server
    stream: Stream
    stat_file: Path
    endpoint: str

    @property
    def counts(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.stat_file.read_text().splitlines()]

    def complete(self, number: int, letters: Iterable[int], max_tokens: int, **more: object) -> int:
        """Completions of several prompts in one request, 20 tokens for each of their letters.

        Returns:
            The number of tokens made.
        """
        answer = httpx.post(
            f"{self.server.url}/v1/completions",
            json={
                "model": MODEL,
                "prompt": ["even steps, odd ones"[:some] * 20 for some in letters],
                "max_tokens": max_tokens,
                "ignore_eos": True,
                **more,
            },
            headers={"X-Request-Id": token(number)},
            timeout=WAIT_S,
        )
        answer.raise_for_status()
        return int(answer.json()["usage"]["completion_tokens"])

    def rest(self) -> None:
        """Wait until the stream has shown the end of all work, and vLLM has counted it."""

        def resting() -> bool:
            told, counts = self.stream.snapshots, self.counts
            return bool(told and counts) and self._idle(told[-1]) and not counts[-1]["running"]

        wait_until(resting, WAIT_S, "the engine rests")

    @staticmethod
    def _idle(snapshot: Snapshot) -> bool:
        return snapshot.step_s == 0 and not (snapshot.kv_groups[0].blocks_used or snapshot.waiting)


@contextlib.contextmanager
def watching(
    installation: Installation, folder: Path, *flags: str, vllm: Path | None = None, **settings: Any
) -> Iterator[Watched]:
    """Serve the tiny model with the plug-in, by this vLLM; ``settings`` are the plug-in's."""
    endpoint = f"tcp://127.0.0.1:{free_port(2)}"
    plug_in = {"snapshots": endpoint, "group": "g", "worker": "w", **settings}
    config = json.dumps({"evenstep": plug_in})
    with pytest.MonkeyPatch.context() as patch:
        paths = [*([] if vllm is None else [vllm]), ROOT, install(folder)]
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))
        patch.setenv("STAT_LOG_FILE", str(folder / "stats.jsonl"))
        more = ("--additional-config", config)
        with running_engine(installation, folder, *flags, *more) as server:
            stream, stop = Stream(), threading.Event()
            reader = threading.Thread(target=stream.read, args=(endpoint, stop))
            reader.start()
            try:
                wait_until(lambda: bool(stream.snapshots), WAIT_S, "a first heartbeat")
                yield Watched(server, stream, folder / "stats.jsonl", endpoint)
            finally:
                stop.set()
                reader.join()


@dataclass(frozen=True)
class Moment:
    """What both tell of a step."""

    running: int
    waiting: int
    blocks_used: int


def told(snapshots: list[Snapshot]) -> list[tuple[Moment, int, bool]]:
    """Moments in which anything happened, preemptions so far, and whether all are made up for."""
    feed, moments = Feed(), []
    feed.apply(snapshots[0], 0.0)
    last = Moment(0, 0, 0)
    for snapshot in snapshots[1:]:
        feed.apply(snapshot, 0.0)
        (group,) = snapshot.kv_groups
        now = Moment(feed.running, snapshot.waiting, group.blocks_used)
        computed = snapshot.scheduled_prefill_tokens + snapshot.scheduled_decode_tokens
        settled = not snapshot.waiting and feed.resident_tokens == feed.load_tokens
        if computed or now != last:
            moments.append((now, snapshot.preemptions_total, settled))
        last = now
    return moments


def counted(counts: list[dict[str, Any]], blocks: int) -> list[tuple[Moment, int]]:
    """The same of what vLLM counted; it counts a preemption with the request's next token."""
    moments, last, preemptions = [], Moment(0, 0, 0), 0
    for one in counts:
        preemptions += one["preempted"]
        now = Moment(one["running"], one["waiting"], round(one["kv_usage"] * blocks))
        if one["generated"] or now != last:
            moments.append((now, preemptions))
        last = now
    return moments


def changes(moments: Iterable[Moment]) -> list[Moment]:
    """Moments without repetitions: vLLM's front end counts no token for a client that has left."""
    return [moment for moment, _ in groupby(moments)]
