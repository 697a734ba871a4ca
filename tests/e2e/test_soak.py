"""Ten minutes of everything at once: load, clients that leave, workers that fail, new settings."""

import asyncio
import contextlib
import itertools
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from tests.support.chaos import workers_of
from tests.support.chaos_run import (
    RANKS,
    TOGETHER_S,
    WARM_UP,
    Load,
    account,
    chaotic,
    files_open,
    memory_mb,
    settle,
    under_faults,
)
from tests.support.chaos_schedule import ALL, Ask, asks, strikes
from tests.support.fleet import Fleet
from tests.support.server import Server, free_port
from tests.support.slopes import slope

SECONDS = 600
# Caches fill at first: histories, curves of lengths, what Python keeps for later.
SETTLING_S = 200
EVERY_S = 2.0
OPERATE_EVERY_S = 10.0
POLICIES = ("bfio", "least_tokens", "jsq", "balance_route")
# A kilobyte that every request left behind would be more than five times as much.
MOST_MB_PER_MINUTE = 1.0


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 300)
async def test_chaos_for_ten_minutes_leaves_memory_flat(
    tmp_path: Path, chaos_seed: int, say: Callable[[object], None]
) -> None:
    config, admin_port = tmp_path / "evenstep.toml", free_port()
    config.write_text("")
    flags = ("--config", str(config), "--admin-port", str(admin_port))
    with chaotic(tmp_path, *flags) as (fleet, router, record):
        load, requests = Load(router), asks(chaos_seed)
        await load.run(itertools.islice(requests, WARM_UP))
        open_files, began_s, ended = files_open(router), time.monotonic(), asyncio.Event()
        watching = asyncio.create_task(_memory(router, ended))
        operating = asyncio.create_task(_operate(router, fleet, config, admin_port, ended))
        async with under_faults(fleet, load, strikes(chaos_seed, ALL, RANKS)) as struck:
            await load.run(_until(began_s + SECONDS, requests))
        ended.set()
        memory, changes = await watching, await operating
        await asyncio.to_thread(settle, fleet, load, open_files)
        told = account(chaos_seed, load, record, struck, time.monotonic() - began_s)
    late = [(at_s / 60, mb) for at_s, mb in memory if at_s >= SETTLING_S]
    growth = slope(late)
    say(told)
    say(
        f"settings read again, a worker removed and added: {changes} times\n"
        f"router's memory: {memory[0][1]:.0f} MB at first, {late[0][1]:.0f} MB after "
        f"{SETTLING_S} s, {late[-1][1]:.0f} MB at the end; since then "
        f"{growth.mean:+.2f} ± {growth.half_width:.2f} MB a minute (95 %)"
    )
    assert growth.half_width is not None
    assert growth.mean + growth.half_width < MOST_MB_PER_MINUTE
    assert told.ends["complete"] > told.ends.total() / 2
    assert told.overlap_s < TOGETHER_S
    assert set(told.struck) == set(ALL)


def _until(end_s: float, requests: Iterator[Ask]) -> Iterator[Ask]:
    return itertools.takewhile(lambda _: time.monotonic() < end_s, requests)


async def _passed(ended: asyncio.Event, seconds: float) -> bool:
    """Wait so long; false if the run has ended before."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(ended.wait(), seconds)
    return not ended.is_set()


async def _operate(
    router: Server, fleet: Fleet, config: Path, admin_port: int, ended: asyncio.Event
) -> int:
    """What operators do meanwhile: another policy, and a worker that goes and comes; how often."""
    count = 0
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{admin_port}", timeout=60) as admin:
        told = await asyncio.to_thread(workers_of, router)
        workers = [(worker["id"], spec) for worker, spec in zip(told, fleet.workers, strict=True)]
        while await _passed(ended, OPERATE_EVERY_S):
            policy = POLICIES[count % len(POLICIES)]
            await asyncio.to_thread(config.write_text, f'policy = "{policy}"\n')
            router.process.send_signal(signal.SIGHUP)
            worker_id, spec = workers[count % len(workers)]
            path = f"/workers/{quote(worker_id, safe='')}?force=true"
            for answer in (await admin.delete(path), await admin.post("/workers", content=spec)):
                assert answer.is_success, answer.text
            count += 1
    return count


async def _memory(router: Server, ended: asyncio.Event) -> list[tuple[float, float]]:
    """Seconds and MB."""
    began_s = time.monotonic()
    found = [(0.0, memory_mb(router))]
    while await _passed(ended, EVERY_S):
        found.append((time.monotonic() - began_s, memory_mb(router)))
    return found
