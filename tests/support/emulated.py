"""Emulated fleets inside a test's own event loop, and a state stream as a router sees it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import zmq
import zmq.asyncio

from loadgen.emulator.emulated_fleet import EmulatedFleet
from loadgen.emulator.emulator_settings import EmulatorSettings
from loadgen.engine.engine_features import EngineFeatures
from loadgen.engine.prefill_settings import PrefillSettings
from router.core.step_time import StepTime
from router.core.types import Snapshot
from router.core.wire import decode, full_endpoint

TIMEOUT_S = 60.0
QUICK = StepTime(base_s=1e-3, per_token_s=0.0)
PLAIN = EngineFeatures(prefix_caching=False, block_tokens=1)


@asynccontextmanager
async def emulated(folder: Path, **settings: Any) -> AsyncIterator[EmulatedFleet]:
    """A fleet on free ports with a state stream per worker.

    Unless told otherwise a step takes 1 ms, and nothing is cached.
    """
    prefill: PrefillSettings | None = settings.get("prefill")
    ranks = settings.setdefault("workers", 1) + (prefill.workers if prefill else 0)
    settings.setdefault("step_time", QUICK)
    settings.setdefault("features", PLAIN)
    settings.setdefault("snapshots", tuple(f"ipc://{folder}/{rank}" for rank in range(ranks)))
    async with EmulatedFleet(EmulatorSettings(**settings)) as fleet:
        yield fleet


async def eventually(condition: Callable[[], bool], what: str) -> None:
    """Give the loop turns until the condition holds.

    Raises:
        AssertionError: it does not within the timeout.
    """
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():  # noqa: ASYNC110 - nothing tells when an engine's state changes
                await asyncio.sleep(0)
    except TimeoutError:
        raise AssertionError(f"never: {what}") from None


@asynccontextmanager
async def client(fleet: EmulatedFleet, rank: int = 0) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of one worker."""
    url = fleet.listeners[rank].url
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as http:
        yield http


@asynccontextmanager
async def openai_client(fleet: EmulatedFleet) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client of the first worker; it asks once."""
    async with openai.AsyncOpenAI(
        base_url=f"{fleet.listeners[0].url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S
    ) as api:
        yield api


async def control(fleet: EmulatedFleet, path: str, **body: object) -> httpx.Response:
    """POST to the fault port."""
    async with httpx.AsyncClient(base_url=fleet.control.url, timeout=TIMEOUT_S) as http:
        return await http.post(path, json=body)


class StreamReader:
    """Reads one worker's state stream."""

    def __init__(self, endpoint: str) -> None:
        self.context = zmq.asyncio.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.setsockopt(zmq.SUBSCRIBE, b"")
        self.sub.setsockopt(zmq.RECONNECT_IVL, 10)
        self.sub.connect(endpoint)
        self.dealer = self.context.socket(zmq.DEALER)
        self.dealer.setsockopt(zmq.RECONNECT_IVL, 10)
        self.dealer.connect(full_endpoint(endpoint))

    async def next(self) -> Snapshot:
        """The next message of the stream."""
        return decode(await asyncio.wait_for(self.sub.recv(), TIMEOUT_S))

    async def full(self) -> Snapshot:
        """Ask for a full snapshot."""
        await self.dealer.send(b"")
        return decode(await asyncio.wait_for(self.dealer.recv(), TIMEOUT_S))

    def close(self) -> None:
        """Disconnect."""
        self.context.destroy(linger=0)


@asynccontextmanager
async def reading(fleet: EmulatedFleet, rank: int = 0) -> AsyncIterator[StreamReader]:
    """A reader of one worker's state stream, subscribed."""
    reader = StreamReader(fleet.settings.snapshots[rank])
    try:
        await reader.next()
        yield reader
    finally:
        reader.close()
