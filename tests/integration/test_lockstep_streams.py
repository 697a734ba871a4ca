"""Streams of a lockstep group whose engines are well: one that breaks is nobody else's trouble."""

import asyncio
from pathlib import Path

from router.engines.http_client import HttpClient
from tests.support.chaos import Seen, ask, body, live
from tests.support.scripted import (
    DONE,
    TIMEOUT_S,
    Exchange,
    ScriptedServer,
    scripted,
    soon,
    token_events,
    until,
)
from tests.support.server import Server, running_router, wait_until

TOKENS = token_events(5)
CONTROL = {
    "/health": b"ok",
    "/v1/models": b'{"data": [{"id": "emulated"}]}',
    "/is_sleeping": b'{"is_sleeping": false}',
    "/is_paused": b'{"is_paused": false}',
    "/metrics": b"",
}


class WellEngine:
    """Answers what it is asked of itself, and leaves the completions to the test."""

    def __init__(self, server: ScriptedServer) -> None:
        self.completions: asyncio.Queue[Exchange] = asyncio.Queue()
        self.health_checks = 0
        self._server = server

    async def run(self) -> None:
        while True:
            exchange = await self._server.next()
            if exchange.method == "POST":
                self.completions.put_nowait(exchange)
                continue
            self.health_checks += exchange.target == "/health"
            await exchange.answer(CONTROL[exchange.target])


async def test_a_stream_that_breaks_does_not_end_the_others(tmp_path: Path) -> None:
    async with scripted(2) as servers:
        engines = [WellEngine(server) for server in servers]
        answering = [asyncio.create_task(engine.run()) for engine in engines]
        specs = [part for server in servers for part in ("--worker", server.url)]
        flags = (*specs, "--policy", "round_robin", "--lockstep", "default")
        running = running_router(tmp_path, *flags)
        router = await asyncio.to_thread(running.__enter__)
        try:
            await asyncio.to_thread(
                wait_until, lambda: live(router) == [0, 1], TIMEOUT_S, "both are up"
            )
            await broken_amid(router, engines)
        finally:
            await asyncio.to_thread(running.__exit__, None, None, None)
            for task in answering:
                task.cancel()


async def broken_amid(router: Server, engines: list[WellEngine]) -> None:
    """Four streams, one of which breaks; the others go on after the next health checks."""
    client, seen = HttpClient(), [Seen() for _ in range(4)]
    asked = [asyncio.create_task(ask(client, router, one, body(5))) for one in seen]
    begun = [await soon(engine.completions.get()) for engine in engines for _ in "12"]
    for exchange in begun:
        await exchange.start_stream()
        await exchange.chunks(*TOKENS[:2])
    for one in seen:
        await soon(one.first.wait())
    begun[0].reset()
    await asyncio.wait(asked, timeout=TIMEOUT_S, return_when="FIRST_COMPLETED")

    for engine in engines:
        engine.health_checks = 0
    await until(lambda: min(engine.health_checks for engine in engines) > 1)
    for exchange in begun[1:]:
        await exchange.chunks(*TOKENS[2:], DONE)
        await exchange.end_stream()
    await soon(asyncio.gather(*asked))
    assert sorted(one.errors for one in seen) == [0, 0, 0, 1]
    assert [one.body for one in seen if one.complete] == [b"".join(TOKENS) + DONE] * 3
    await client.aclose()
