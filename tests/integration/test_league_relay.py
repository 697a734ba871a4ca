"""The league's relay: what it passes on, when it ends a request, and what it tells of its cost."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from tests.bench.league.relay import ROUND_ROBIN, Asked, Relay, figures_of, listening, relaying
from tests.support.scripted import DONE, ScriptedServer, event, scripted, soon, token_events, until

WAIT_S = 0.05
TICK_S = 1e-3
USAGE = event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}})


@dataclass
class Clock:
    """It goes on by a tick with each look at it, however busy the machine is."""

    now_s: float = 0.0

    def perf_counter(self) -> float:
        self.now_s += TICK_S
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The relay's."""
    clock = Clock()
    told = SimpleNamespace(perf_counter=clock.perf_counter, process_time=time.process_time)
    monkeypatch.setattr("tests.bench.league.relay.time", told)
    return clock


class Second:
    """Takes its time, and then the second worker."""

    def __init__(self) -> None:
        self.first: list[Asked] = []
        self.ended: list[tuple[Asked, bool]] = []
        self.clock, self.takes_s = Clock(), 0.0

    async def choose(self, asked: Asked) -> int:
        await asyncio.sleep(WAIT_S)
        self.clock.now_s += self.takes_s
        if asked.fields.get("prompt") == "none":
            raise RuntimeError("no worker for this")
        return 1

    def on_first_token(self, asked: Asked) -> None:
        self.first.append(asked)

    def on_end(self, asked: Asked, whole: bool) -> None:
        self.ended.append((asked, whole))

    def evidence(self) -> Mapping[str, float]:
        return {"ended": len(self.ended)}


@asynccontextmanager
async def relayed() -> AsyncIterator[tuple[httpx.AsyncClient, ScriptedServer, Second]]:
    """A client of the relay, the engine that is chosen, and the chooser."""
    async with scripted(2) as engines:
        chooser = Second()
        relay = Relay([engine.url for engine in engines], chooser)
        async with await listening(relay, 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
                yield http, engines[1], chooser
        await relay.engines.aclose()
        assert engines[0].connections == 0


async def test_bytes_pass_unchanged_and_the_chooser_hears_of_them() -> None:
    events = [*token_events(4), USAGE, DONE]
    async with relayed() as (http, engine, chooser):
        body = b'{"prompt": "\\u00e9", "stream": true}'
        headers = {"content-type": "application/json", "x-request-id": "seven"}
        asking = asyncio.create_task(
            http.post("/v1/completions?a=b", content=body, headers=headers)
        )
        exchange = await engine.next()
        assert (exchange.method, exchange.target) == ("POST", "/v1/completions?a=b")
        assert exchange.body == body
        assert exchange.headers["x-request-id"] == "seven"
        await exchange.start_stream(x_engine="two")
        await exchange.chunks(events[0])
        await until(lambda: len(chooser.first) == 1)
        await exchange.chunks(*events[1:])
        await exchange.end_stream()
        answer = await soon(asking)

        assert answer.content == b"".join(events)
        assert (answer.status_code, answer.headers["x-engine"]) == (200, "two")
        [(asked, whole)] = chooser.ended
        assert whole
        assert asked.events == len(events)
        assert asked.usage == {"prompt_tokens": 3, "completion_tokens": 4}
        assert asked.arrived_s < asked.sent_s < asked.first_s <= asked.last_s


async def test_an_answer_of_known_length_keeps_it_also_when_it_is_a_refusal() -> None:
    async with relayed() as (http, engine, chooser):
        for status, body in ((200, b'{"a":1}'), (429, b"later")):
            asking = asyncio.create_task(http.post("/v1/completions", json={}))
            await (await engine.next()).answer(body, status)
            answer = await soon(asking)
            assert (answer.status_code, answer.content) == (status, body)
            assert answer.headers["content-length"] == str(len(body))
        assert engine.connections == 1
        assert [whole for _, whole in chooser.ended] == [True, False]
        assert len(chooser.first) == 1


async def test_its_own_cost_leaves_the_choosers_answer_out(clock: Clock) -> None:
    async with relayed() as (http, engine, chooser):
        chooser.clock, chooser.takes_s = clock, 100.0
        for _ in range(3):
            asking = asyncio.create_task(http.post("/v1/completions", json={}))
            await (await engine.next()).stream(*token_events(5))
            await soon(asking)
        told = (await http.get("/relay")).json()
        assert told["relay_requests"] == told["ended"] == 3
        assert told["relay_events"] == 15
        assert told["chooser_p50_s"] >= chooser.takes_s
        assert 0 < told["relay_overhead_p50_s"] <= 10 * TICK_S
        assert told["relay_cpu_s"] > 0


async def test_a_client_that_is_gone_ends_its_request_at_the_engine() -> None:
    async with relayed() as (http, engine, chooser):
        for answered in (True, False):
            asking = asyncio.create_task(http.post("/v1/completions", json={}))
            exchange = await engine.next()
            if answered:
                await exchange.start_stream()
                await exchange.chunks(*token_events(1))
                await until(lambda: len(chooser.first) == 1)
            asking.cancel()
            await exchange.left()
        await until(lambda: len(chooser.ended) == 2)
        assert not any(whole for _, whole in chooser.ended)


async def test_an_answer_that_breaks_off_does_so_for_the_client() -> None:
    async with relayed() as (http, engine, chooser):
        asking = asyncio.create_task(http.post("/v1/completions", json={}))
        exchange = await engine.next()
        await exchange.start_stream()
        await exchange.chunks(*token_events(1))
        await until(lambda: len(chooser.first) == 1)
        exchange.reset()
        assert isinstance(
            (await asyncio.gather(asking, return_exceptions=True))[0], httpx.RemoteProtocolError
        )
        assert [whole for _, whole in chooser.ended] == [False]


async def test_without_a_worker_or_an_engine_the_client_is_told() -> None:
    async with relayed() as (http, engine, chooser):
        refused = await http.post("/v1/completions", json={"prompt": "none"})
        assert refused.status_code == 503
        assert refused.json()["error"]["message"] == "RuntimeError: no worker for this"
        assert chooser.ended == []
        await engine.stop()
        assert (await http.post("/v1/completions", json={})).status_code == 502
        assert [whole for _, whole in chooser.ended] == [False]


async def test_as_a_process_it_takes_engines_in_turn(tmp_path: Path) -> None:
    async with scripted(2) as engines:
        urls = [engine.url for engine in engines]

        def run() -> dict[str, float]:
            with relaying(urls, tmp_path, ROUND_ROBIN, {}) as relay:
                for _ in range(4):
                    httpx.post(
                        f"{relay.url}/v1/completions", json={}, timeout=30
                    ).raise_for_status()
                return figures_of(relay.url)

        running = asyncio.create_task(asyncio.to_thread(run))
        for turn in range(4):
            await (await engines[turn % 2].next()).answer(b"{}")
        assert (await soon(running))["relay_requests"] == 4
