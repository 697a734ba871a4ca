"""A minute of everything at once: load, clients that leave, workers that fail and come back."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter
from pathlib import Path

import pytest

from router.engines.upstream import HttpClient
from tests.support.chaos import Seen, ask, assert_idle, body, cluster, live
from tests.support.fleet import Fleet
from tests.support.server import Server, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SECONDS = 60
CLIENTS = 32
FAULTS = ("kill", "refuse", "slow", "error", "garbage")
# Room for caches and for what Python does not give back; a leak per request would be far more.
GROWTH_MB = 40


async def test_nothing_leaks_under_random_faults(tmp_path: Path) -> None:
    rng = random.Random(7)
    with cluster(tmp_path) as (fleet, router):
        client = HttpClient()
        outcomes: Counter[str] = Counter()
        await _load(client, router, 2, rng, outcomes)
        before_mb = resident_mb(router)
        async with asyncio.timeout(SECONDS + 60):
            ended = asyncio.Event()
            faults = asyncio.create_task(_faults(fleet, rng, ended))
            await _load(client, router, SECONDS, rng, outcomes)
            ended.set()
            assert await faults > SECONDS // 4
        wait_until(lambda: live(router) == [0, 1, 2], 60, "all workers are up again")
        await asyncio.to_thread(assert_idle, fleet, router)
        assert resident_mb(router) - before_mb < GROWTH_MB
        last = await ask(client, router, Seen(), body(5))
        assert last.complete
        await client.aclose()
    assert outcomes["complete"] > 1000
    assert outcomes["left"] > 100
    assert outcomes["500"] > 0
    assert outcomes["broken off"] > 0
    assert set(outcomes) <= {"complete", "left", "broken off", "429", "500", "502", "503"}, outcomes


async def _load(
    client: HttpClient, router: Server, seconds: float, rng: random.Random, seen: Counter[str]
) -> None:
    end_s = time.monotonic() + seconds
    async with asyncio.TaskGroup() as clients:
        for _ in range(CLIENTS):
            clients.create_task(_one_client(client, router, end_s, rng, seen))


async def _one_client(
    client: HttpClient, router: Server, end_s: float, rng: random.Random, seen: Counter[str]
) -> None:
    while time.monotonic() < end_s:
        request = body(rng.randint(1, 30), stream=rng.random() < 0.7)
        leaves_after_s = rng.uniform(0, 0.2) if rng.random() < 0.1 else None
        answer = Seen()
        try:
            async with asyncio.timeout(leaves_after_s):
                await ask(client, router, answer, request)
        except TimeoutError:
            seen["left"] += 1
        else:
            seen[_outcome(answer)] += 1


def _outcome(answer: Seen) -> str:
    if answer.status != 200:
        return str(answer.status)
    if not answer.body.startswith(b"data:"):
        return "complete"
    if answer.complete:
        return "complete"
    assert answer.errors == 1, answer.body
    assert answer.events[-1]["error"]["code"] == 502
    return "broken off"


async def _faults(fleet: Fleet, rng: random.Random, ended: asyncio.Event) -> int:
    """Break one worker after the other; returns how many it were."""
    count = 0
    while not ended.is_set():
        rank = rng.randrange(len(fleet.workers))
        await asyncio.to_thread(fleet.fault, rank, rng.choice(FAULTS))
        count += 1
        await asyncio.sleep(rng.uniform(0.1, 1.0))
        await asyncio.to_thread(fleet.restore, rank)
        await asyncio.sleep(rng.uniform(0.1, 0.5))
    return count


def resident_mb(server: Server) -> float:
    """Memory of the server's process."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) / 1024
