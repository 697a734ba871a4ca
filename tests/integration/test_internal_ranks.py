"""Ranks behind one URL, told apart by a header, each with a state stream of its own."""

import asyncio
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from tests.support.chaos import body, workers_of
from tests.support.emulated import TIMEOUT_S, emulated
from tests.support.round_robin import ranks_behind
from tests.support.server import running_router, wait_until

RANKS = 2


async def test_requests_reach_the_rank_whose_stream_shows_them(tmp_path: Path) -> None:
    slow = emulated(tmp_path, workers=RANKS, slots=4, time_scale=100.0)
    async with slow as fleet:
        with ranks_behind([urlsplit(each.url).port or 0 for each in fleet.listeners]) as url:
            specs = [
                part
                for rank, endpoint in enumerate(fleet.settings.snapshots)
                for part in ("--worker", f"{url},rank={rank},snapshots={endpoint}")
            ]
            await asyncio.to_thread(_ask, tmp_path, [*specs, "--policy", "least_tokens"])


def _ask(folder: Path, specs: list[str]) -> None:
    with running_router(folder, *specs) as router, httpx.Client(timeout=TIMEOUT_S) as client:

        def told(key: str) -> list[object]:
            return [worker[key] for worker in workers_of(router)]

        wait_until(lambda: told("state_source") == ["snapshots"] * RANKS, 60, "both are known")
        request = client.build_request("POST", f"{router.url}/v1/completions", content=body(900))
        streams = [client.send(request, stream=True) for _ in range(2 * RANKS)]
        wait_until(lambda: told("running") == [2] * RANKS, 60, "both ranks run two each")
        assert told("in_flight") == [2] * RANKS
        assert told("free_slots") == [2] * RANKS, "nothing is counted twice"
        for stream in streams:
            stream.close()
        wait_until(lambda: told("load_tokens") == [0] * RANKS, 60, "all are gone")
