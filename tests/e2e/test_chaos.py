"""Requests by the thousand while everything fails: each ends once, with what a worker has sent."""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.chaos_run import (
    RANKS,
    TOGETHER_S,
    Account,
    Load,
    account,
    chaotic,
    run,
    under_faults,
)
from tests.support.chaos_schedule import ALL, FAMILIES, asks, strikes
from tests.support.server import wait_until

Say = Callable[[object], None]


@pytest.mark.parametrize("family", FAMILIES)
async def test_chaos(tmp_path: Path, family: str, chaos_seed: int, say: Say) -> None:
    names = FAMILIES[family]
    check(await run(tmp_path, chaos_seed, 550, names), names, say)


async def test_chaos_while_the_router_ends(tmp_path: Path, chaos_seed: int, say: Say) -> None:
    with chaotic(tmp_path, "--grace", "1") as (fleet, router, record):
        load, began_s = Load(router), time.monotonic()
        async with under_faults(fleet, load, strikes(chaos_seed, ALL, RANKS)) as struck:
            running = asyncio.create_task(load.run(asks(chaos_seed)))
            await load.until(500)
            load.ending = True
            router.process.terminate()
            await running
            assert await asyncio.to_thread(router.process.wait, 60) == 0
        told = account(chaos_seed, load, record, struck, time.monotonic() - began_s)
        await asyncio.to_thread(wait_until, lambda: fleet.unfinished() == 0, 60, "idle engines")
    say(told)
    assert told.ends["complete"] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_chaos_of_ten_thousand_streams(tmp_path: Path, chaos_seed: int, say: Say) -> None:
    check(await run(tmp_path, chaos_seed, 11_000, ALL), ALL, say)


@pytest.mark.slow
async def test_chaos_with_prefill_workers(tmp_path: Path, chaos_seed: int, say: Say) -> None:
    flags = ("--prefill-workers", "2", "--prefill-step-time", "2e-3,1e-6")
    check(await run(tmp_path, chaos_seed, 2_200, ALL, flags), ALL, say)


def check(account: Account, names: Sequence[str], say: Say) -> None:
    say(account)
    assert set(account.struck) == set(names)
    assert account.ends["complete"] > account.ends.total() / 2
    assert account.ends["left"] > 0
    assert account.overlap_s < TOGETHER_S
