"""Two routers before one fleet are restarted one after the other, under load; nothing is lost."""

import asyncio
import contextlib
import json
import random
import re
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.support.fleet import running_fleet, worker_flags
from tests.support.sent import read_sent
from tests.support.server import Server, free_port, starting, wait_ready

_TEXT = re.compile(rb'"text":("(?:[^"\\]|\\.)*")')


@dataclass(slots=True)
class Load:
    """Clients, and what they got.

    Attributes:
        urls: of the routers.
        got: text of each request's answer.
        elsewhere: how often a router did not take a request, by how it said so.
    """

    urls: Sequence[str]
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    got: dict[str, str] = field(default_factory=dict)
    elsewhere: Counter[str] = field(default_factory=Counter)

    async def client(self, number: int) -> None:
        """One request after the other, on connections that are kept, to either router in turn."""
        rng = random.Random(number)
        async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
            asked = 0
            while not self.stopped.is_set():
                asked += 1
                name, tokens = f"c{number}-{asked}", rng.randint(5, 60)
                content = {
                    "model": "emulated",
                    "prompt": [1] * 20,
                    "stream": asked % 4 != 0,
                    "vllm_xargs": {"evenstep_output_tokens": tokens},
                    "max_tokens": 100,
                }
                await self._ask(http, asked, name, json.dumps(content).encode())

    async def _ask(self, http: httpx.AsyncClient, first: int, name: str, content: bytes) -> None:
        for attempt in range(2):
            url = self.urls[(first + attempt) % 2] + "/v1/completions"
            try:
                answer = await http.post(url, content=content, headers={"x-request-id": name})
            except httpx.ConnectError:
                self.elsewhere["refused"] += 1
                continue
            except httpx.NetworkError:
                # The listener closed in the moment of the connection. Had the router taken the
                # request, the engines would have it twice, which fails below.
                self.elsewhere["reset"] += 1
                continue
            if answer.status_code == 503 and answer.headers.get("connection") == "close":
                self.elsewhere["503"] += 1
                continue
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-request-id"] == name
            assert b'"error"' not in answer.content
            self.got[name] = "".join(map(json.loads, _TEXT.findall(answer.content)))
            return
        raise AssertionError(f"{name}: neither router took it")


@pytest.mark.parametrize(
    ("clients", "restarts", "drain_delay"),
    [
        pytest.param(8, 1, "0.5", id="drained"),
        pytest.param(32, 3, "0", id="undrained", marks=pytest.mark.slow),
    ],
)
async def test_no_request_is_lost_and_none_is_served_twice(
    tmp_path: Path, clients: int, restarts: int, drain_delay: str
) -> None:
    answers = tmp_path / "answers.jsonl"
    ports = [free_port(), free_port()]
    with (
        running_fleet(
            tmp_path, "--workers", "2", "--slots", "16", "--answers", str(answers)
        ) as fleet,
        contextlib.ExitStack() as routers,
    ):

        def start(port: int) -> Server:
            command = [sys.executable, "-m", "router.cli", "serve", "--port", str(port)]
            command += [
                "--policy",
                "least_tokens",
                "--drain-delay",
                drain_delay,
                *worker_flags(fleet),
            ]
            log = tmp_path / f"router-{port}-{len(list(tmp_path.iterdir()))}.log"
            return routers.enter_context(starting(command, port, log))

        def restart(port: int) -> None:
            router = running[port]
            router.process.send_signal(signal.SIGTERM)
            assert router.process.wait(timeout=60) == 0, router.log_tail()
            assert "ended; 0 requests in flight, 0 waiting" in router.log_tail()
            running[port] = start(port)
            wait_ready(running[port], 180)

        running = {port: start(port) for port in ports}
        for router in running.values():
            await asyncio.to_thread(wait_ready, router, 180)
        load = Load([router.url for router in running.values()])
        async with asyncio.timeout(240), asyncio.TaskGroup() as tasks:
            for number in range(clients):
                tasks.create_task(load.client(number))
            for port in ports * restarts:
                await asyncio.to_thread(restart, port)
                served = len(load.got)
                while len(load.got) < served + 2 * clients:  # noqa: ASYNC110 - a count, no event
                    await asyncio.sleep(0.05)
            load.stopped.set()

    sent = {one.request.partition(".")[2]: one for one in read_sent(answers)}
    assert len(read_sent(answers)) == len(sent) == len(load.got)
    assert {name: one.texts[0] for name, one in sent.items()} == load.got
    assert all(one.complete for one in sent.values())
    assert load.elsewhere["refused"] > 0
    figures = f"{len(sent)} requests, {2 * restarts} restarts; elsewhere: {dict(load.elsewhere)}"
    print(figures)  # noqa: T201 - the figures are wanted
