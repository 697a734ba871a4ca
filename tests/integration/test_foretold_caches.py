"""What a router foretells of caches, beside what engines find there, whatever befalls either."""

import asyncio
import os
import random
import re
import signal
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import httpx

from loadgen.emulator.emulated_fleet import EmulatedFleet
from loadgen.emulator.faults import Fault
from loadgen.engine.engine_features import EngineFeatures
from tests.support.emulated import TIMEOUT_S, emulated
from tests.support.server import Server
from tests.support.told_hits import noted, running_noting

BLOCK_TOKENS = 16
ASKED = 40
UNREAD_STEPS = 3500  # more messages than sockets hold
CHUNK_TOKENS = 128  # of 512 bytes, of which the emulator makes a token of four


def token_ids(rng: random.Random) -> list[int]:
    return [rng.randrange(3, 2000) for _ in range(900)]


def text(rng: random.Random) -> str:
    return " ".join(f"word{rng.randrange(100)}" for _ in range(500))


class Bench:
    """Two engines with little memory, and a router before them that may go and come back."""

    def __init__(self, fleet: EmulatedFleet, folder: Path, http: httpx.AsyncClient) -> None:
        self.fleet, self.folder, self.http = fleet, folder, http
        self.file = folder / "hits"
        self._rng = random.Random(1)
        self._stack = ExitStack()
        self.router: Server

    async def start(self) -> None:
        """Start a router that knows nothing, and wait until engines have told it their state."""
        self._stack.close()
        flags = [
            part
            for listener, endpoint in zip(
                self.fleet.listeners, self.fleet.settings.snapshots, strict=True
            )
            for part in ("--worker", f"{listener.url},snapshots={endpoint}")
        ]
        flags += ["--policy", "barrier_time"]
        running = running_noting(self.folder, self.file, *flags)
        self.router = await asyncio.to_thread(self._stack.enter_context, running)
        await self.all_told()

    async def stop(self) -> None:
        await asyncio.to_thread(self._stack.close)

    async def all_told(self) -> None:
        async def told() -> bool:
            return await self.metric('workers{group="default",source="snapshots"}') == 2

        await self.until(told)

    async def until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not await condition():  # noqa: ASYNC110 - the router tells nobody
                await asyncio.sleep(0.01)

    async def metric(self, name: str) -> float:
        told = (await self.http.get(f"{self.router.url}/metrics")).text
        values = re.findall(rf"^evenstep_{re.escape(name)}(?:{{.*}})? (\S+)$", told, re.MULTILINE)
        return sum(map(float, values))

    async def ask(self, url: str, prompt: object, tokens: int = 24) -> None:
        body = {"model": "emulated", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        (await self.http.post(f"{url}/v1/completions", json=body)).raise_for_status()

    async def foretold(self, prompts: list[str] | list[list[int]]) -> list[tuple[int, int]]:
        """Tokens foretold and found, of requests one after the other.

        An answer that overtakes its engine's state leaves nothing to compare.
        """
        before = len(noted(self.file))
        for _ in range(2 * ASKED):
            if len(rows := noted(self.file)[before:]) >= ASKED:
                return [row[1:] for row in rows]
            prompt = self._rng.choice(prompts)
            await self.ask(self.router.url, prompt[: self._rng.randrange(200, len(prompt))])
        raise AssertionError(f"of {2 * ASKED} requests only {len(rows)} were compared")

    async def others(self) -> None:
        """Other clients, past the router, take the engines' memory."""
        urls = [listener.url for listener in self.fleet.listeners]
        prompts = [token_ids(self._rng) for _ in range(6)]
        await asyncio.gather(*(self.ask(url, one) for url in urls for one in prompts))

    async def restart_engine(self) -> None:
        await self.fleet.inject(0, Fault("kill"))

        async def down() -> bool:
            return await self.metric("worker_up") < 2

        await self.until(down)
        await self.fleet.restore(0)
        await self.all_told()

    async def restart_router(self) -> None:
        await asyncio.to_thread(self.router.kill)
        await self.start()

    async def leave_unread(self) -> None:
        """The router misses messages: it sees a gap, or its own silence first, and asks for all."""
        asked = await self.metric("snapshot_full_requests_total")
        os.killpg(self.router.process.pid, signal.SIGSTOP)
        await self.others()
        urls = [listener.url for listener in self.fleet.listeners]
        await asyncio.gather(*(self.ask(url, [1], UNREAD_STEPS) for url in urls))
        os.killpg(self.router.process.pid, signal.SIGCONT)

        async def asks() -> bool:
            return await self.metric("snapshot_full_requests_total") >= asked + len(urls)

        await self.until(asks)
        await self.all_told()


async def test_hits_are_foretold(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(
            emulated(
                tmp_path,
                workers=2,
                slots=4,
                kv_tokens=4000,
                features=EngineFeatures(block_tokens=BLOCK_TOKENS),
            )
        )
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=TIMEOUT_S))
        bench = Bench(fleet, tmp_path, http)
        stack.push_async_callback(bench.stop)
        rng = random.Random(2)
        ids, texts = [token_ids(rng) for _ in range(6)], [text(rng) for _ in range(6)]
        await bench.start()
        of_ids, of_texts = [], []
        for upset in (
            bench.others,
            bench.restart_engine,
            bench.restart_router,
            bench.leave_unread,
        ):
            await upset()
            of_ids += await bench.foretold(ids)
            of_texts += await bench.foretold(texts)
    assert sum(found > 0 for _, found in of_ids) > ASKED
    assert sum(found > 0 for _, found in of_texts) > ASKED
    assert sum(foretold == found for foretold, found in of_ids) >= 0.99 * len(of_ids)
    near = [abs(foretold - found) <= CHUNK_TOKENS for foretold, found in of_texts]
    assert sum(near) >= 0.97 * len(near)
