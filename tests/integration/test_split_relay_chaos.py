"""Engines that misbehave in every way, and clients that leave any time: nothing remains."""

import asyncio
import contextlib
import gc
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest

from router.core.events import EngineFailed, WorkerUp
from tests.support.relaying import routed
from tests.support.scripted import (
    DONE,
    TIMEOUT_S,
    Exchange,
    ScriptedServer,
    event,
    until,
)
from tests.support.serving import MODEL, Router
from tests.support.splitting import ANSWER, PARAMS, TOKENS, kept

REQUESTS = 300
KEPT_S = 0.3
WORKERS = "abcde"
ROLE = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
FAILED = event({"error": {"message": "KV load failed", "code": 500}})

Act = Callable[[Exchange], Awaitable[None]]


async def cut_short(exchange: Exchange) -> None:
    await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")
    exchange.close()


async def break_off(exchange: Exchange, *events: bytes) -> None:
    await exchange.start_stream()
    await exchange.chunks(*events)
    exchange.close()


async def reset(exchange: Exchange) -> None:
    exchange.reset()


def prefilled(tokens: int, **more: Any) -> bytes:
    return json.dumps({"usage": {"prompt_tokens": tokens}, **more}).encode()


PREFILLS: list[tuple[int, Act]] = [
    (10, lambda x: x.answer(prefilled(77, kv_transfer_params=PARAMS))),
    (2, lambda x: x.answer(prefilled(77))),
    (1, lambda x: x.answer(prefilled(-1))),
    (1, lambda x: x.answer(b"{")),
    (1, lambda x: x.answer(b"{}", 500)),
    (1, lambda x: x.answer(b"{}", 400)),
    (1, lambda x: x.send(b"no HTTP at all\r\n\r\n")),
    (1, cut_short),
    (2, reset),
]
DECODES: list[tuple[int, Act]] = [
    (4, lambda x: x.answer(ANSWER)),
    (10, lambda x: x.stream(ROLE, *TOKENS, DONE)),
    (2, lambda x: x.stream(*TOKENS, DONE)),
    (1, lambda x: x.answer(b"{}", 500)),
    (1, lambda x: x.answer(b"{}", 400)),
    (1, lambda x: x.stream(FAILED, DONE)),
    (1, lambda x: x.stream(ROLE, FAILED, DONE)),
    (4, lambda x: break_off(x, ROLE)),
    (1, lambda x: break_off(x, ROLE, *TOKENS[:2])),
    (1, cut_short),
    (2, reset),
]


class Chaos:
    """What happens, by chance."""

    def __init__(self, router: Router, rng: random.Random) -> None:
        self._router = router
        self._rng = rng
        self._tasks: set[asyncio.Task[None]] = set()
        self.outcomes: Counter[object] = Counter()

    def start(self, servers: list[ScriptedServer]) -> None:
        for server, acts in zip(servers, [PREFILLS] * 2 + [DECODES] * 3, strict=True):
            self._go(self._serve(server, acts))
        self._go(self._fail())

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in WORKERS:
            self._router.dispatcher.apply(WorkerUp(worker))

    def _go(self, doing: Any) -> None:
        self._tasks.add(asyncio.create_task(doing))

    async def _serve(self, server: ScriptedServer, acts: list[tuple[int, Act]]) -> None:
        weights, choices = zip(*acts, strict=True)
        while True:
            exchange = await server.next()
            (act,) = self._rng.choices(choices, weights)
            self._go(self._act(act, exchange))

    async def _act(self, act: Act, exchange: Exchange) -> None:
        await asyncio.sleep(self._rng.choice((0.0, 0.03 * self._rng.random(), 0.2)))
        with contextlib.suppress(ConnectionError):  # whoever asked has left
            await act(exchange)

    async def _fail(self) -> None:
        """Workers that go down, come back, have failed, hang."""
        while True:
            await asyncio.sleep(0.05 * self._rng.random())
            worker, router = self._rng.choice(WORKERS), self._router
            kind = self._rng.random()
            if kind < 0.3:
                router.down(worker)
            if kind < 0.1:
                router.dispatcher.apply(EngineFailed(worker))
                router.attempts.recall(worker, "no answer")
            elif 0.3 < kind < 0.35:
                router.attempts.break_off(worker, "no answer")
            elif kind > 0.35:
                for each in WORKERS:
                    router.dispatcher.apply(WorkerUp(each))

    async def ask(self, http: httpx.AsyncClient) -> None:
        """A client that may leave."""
        fields: list[dict[str, Any]] = [{}, {"n": 2}, {"echo": True}, {"prompt": [1] * 3000}]
        body = {"model": MODEL, "prompt": [1, 2, 3], **self._rng.choice(fields)}
        await asyncio.sleep(1.5 * self._rng.random())
        patience_s = self._rng.choice((None, None, 0.2 * self._rng.random()))
        try:
            async with asyncio.timeout(patience_s):
                answer = await http.post("/v1/completions", json=body)
        except TimeoutError:
            self.outcomes["left"] += 1
        else:
            self.outcomes[answer.status_code] += 1
            # A test that stands still for a second may have found nobody up for so long.
            assert answer.status_code != 503 or b"is up (" in answer.content, answer.content
            assert_whole(answer.content)


def assert_whole(body: bytes) -> None:
    """Nothing of a stream comes twice, or behind its end."""
    if not body.startswith(b"data:"):
        return
    assert body.count(b'"role"') <= 1, body
    assert body.count(TOKENS[0]) <= 1, body
    done, failed = body.endswith(DONE), b'"error"' in body
    assert body.count(DONE) == done, body
    assert done or failed, body


@contextlib.asynccontextmanager
async def clients(router: Router) -> AsyncIterator[httpx.AsyncClient]:
    """Each on a connection of its own: what the router closes is nobody else's."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(
        base_url=router.url, timeout=TIMEOUT_S, limits=limits, trust_env=False
    ) as http:
        yield http


@pytest.mark.parametrize("kept_s", [KEPT_S, None], ids=["params", "content"])
async def test_nothing_is_left_of_any_request(kept_s: float | None) -> None:
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what))
    settings = {"prefills": 2, "slots": 3, "max_attempts": 4, "pool_size": 30, "kept_s": kept_s}
    async with routed(len(WORKERS), **settings) as (router, servers), clients(router) as http:
        chaos = Chaos(router, random.Random(7))
        chaos.start(servers)
        async with asyncio.timeout(2 * TIMEOUT_S):
            await asyncio.gather(*(chaos.ask(http) for _ in range(REQUESTS)))
        await chaos.stop()
        await router.settled()
        await until(lambda: not kept(router, "a") + kept(router, "b"))
        assert sum(chaos.outcomes.values()) == REQUESTS
        assert set(chaos.outcomes) <= {200, 400, 429, 500, 502, 503, "left"}, chaos.outcomes
        assert chaos.outcomes[200] > REQUESTS / 10, chaos.outcomes
        assert not router.dispatcher.cluster._requests
        assert not any(queue.waiters for queue in router.dispatcher.queues.values())
        assert not any(router.attempts._of.values())
        assert not any(answer._connection for answer in router.upstream.answers)
    gc.collect()  # a future whose error nobody has asked for says so when it goes
    assert not complaints
