"""Ranks behind one URL, told apart by a header, each with a state stream of its own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from loadgen.emulator.emulated_fleet import EmulatedFleet
from tests.support.chaos import body, workers_of
from tests.support.emulated import TIMEOUT_S, emulated
from tests.support.round_robin import copy
from tests.support.server import running_router, wait_until

RANKS = 2


@asynccontextmanager
async def front(fleet: EmulatedFleet) -> AsyncIterator[str]:
    """One URL for all ranks, as vLLM's internal data parallelism has it: the header says which."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        names = [line.lower() for line in head.split(b"\r\n")]
        ranks = [line[-1:] for line in names if line.startswith(b"x-data-parallel-rank:")]
        rank = int(ranks[0]) if ranks else 0
        port = fleet.listeners[rank].url.rpartition(":")[2]
        back, forth = await asyncio.open_connection("127.0.0.1", int(port))
        # One request for each connection, so that every one is sent where it says.
        forth.write(head.replace(b"\r\n", b"\r\nconnection: close\r\n", 1))
        await asyncio.gather(copy(reader, forth), copy(back, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def test_requests_reach_the_rank_whose_stream_shows_them(tmp_path: Path) -> None:
    slow = emulated(tmp_path, workers=RANKS, slots=4, time_scale=100.0)
    async with slow as fleet, front(fleet) as url:
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
