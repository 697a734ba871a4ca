"""The real Envoy before a router and engines that a test plays itself."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from router.http.port import DataPlane, HttpLimits
from router.pick.grpc_port import GrpcPort
from router.pick.picks import Picks
from tests.support.envoy import running_envoy
from tests.support.scripted import TIMEOUT_S, ScriptedServer, scripted, until
from tests.support.server import free_port
from tests.support.serving import Router, serving


@dataclass(frozen=True, slots=True)
class Gateway:
    """Envoy's process and what it asks; ``router.http`` is a client of Envoy."""

    router: Router
    url: str
    grpc: int

    @property
    def picks(self) -> Picks:
        return self.router.picks

    @property
    def ends(self) -> dict[str, int]:
        """How many requests have ended, by who told it."""
        return {by: count for by, count in self.picks.counts.ends.items() if count}


@contextlib.asynccontextmanager
async def gateway(
    folder: Path,
    engines: Sequence[ScriptedServer],
    *,
    ext_proc: bool = False,
    change: Callable[[Any], None] = lambda _: None,
    certificate: tuple[bytes, bytes | None] | None = None,
    known: Sequence[str] = (),
    most_bytes: int = HttpLimits().max_body_bytes,
    **settings: Any,
) -> AsyncIterator[Gateway]:
    """Envoy with the configuration of ``deploy/envoy``, until the block ends.

    ``known``: engines that Envoy knows, by their URLs, if it does not know all.
    """
    async with serving(engines, plane=DataPlane.SPLICE, **settings) as router:
        grpc, urls = free_port(), known or [engine.url for engine in engines]
        port = GrpcPort(
            router.picks, f"127.0.0.1:{grpc}", certificate, router.tasks, 30.0, most_bytes
        )
        running = [asyncio.create_task(each.run()) for each in (port, router.picks)]
        there = running_envoy(folder, router.port, grpc, urls, ext_proc=ext_proc, change=change)
        try:
            envoy = await asyncio.to_thread(there.__enter__)
            try:
                limits = httpx.Limits(max_connections=None)
                async with httpx.AsyncClient(
                    base_url=envoy.url, timeout=TIMEOUT_S, limits=limits, trust_env=False
                ) as http:
                    yield Gateway(replace(router, http=http), envoy.url, grpc)
            finally:
                await asyncio.to_thread(there.__exit__, None, None, None)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


@contextlib.asynccontextmanager
async def gated(
    folder: Path, count: int = 1, *, ranks: int = 1, **settings: Any
) -> AsyncIterator[tuple[Gateway, list[ScriptedServer]]]:
    """As ``gateway``, before so many engines of so many ranks each."""
    async with scripted(count) as engines, gateway(folder, engines * ranks, **settings) as gate:
        yield gate, engines


async def settled(gate: Gateway) -> None:
    """Nothing is counted still, at the workers or at gateways."""
    await until(lambda: not gate.picks.counts.open)
    await gate.router.settled()
