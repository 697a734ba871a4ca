"""Workers that die and clients that leave, before an emulated fleet and a real router process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.engines.upstream import HttpClient
from router.errors import UpstreamError
from tests.support.fleet import Fleet, running_fleet, worker_flags
from tests.support.server import Server, running_router, wait_until

HEADERS = [(b"content-type", b"application/json")]
SLOTS = 4
WORKERS = 3


@dataclass(slots=True)
class Seen:
    """What one client saw of its answer."""

    status: int = 0
    body: bytes = b""
    first: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def events(self) -> list[Any]:
        """Parsed events, the closing one as None; fails on an event that is cut."""
        assert self.body.endswith(b"\n\n"), self.body[-80:]
        texts = [event.removeprefix(b"data: ") for event in self.body.split(b"\n\n")[:-1]]
        return [None if text == b"[DONE]" else json.loads(text) for text in texts]

    @property
    def errors(self) -> int:
        return sum(event is not None and "error" in event for event in self.events)

    @property
    def complete(self) -> bool:
        return self.status == 200 and self.events[-1] is None and not self.errors


@contextlib.contextmanager
def cluster(folder: Path, *fleet_flags: str, workers: int = WORKERS) -> Iterator[Any]:
    flags = ("--workers", str(workers), "--slots", str(SLOTS), *fleet_flags)
    with (
        running_fleet(folder, *flags) as fleet,
        running_router(folder, *worker_flags(fleet)) as router,
    ):
        wait_until(lambda: len(live(router)) == workers, 10, "all workers are up")
        yield fleet, router


def workers_of(router: Server) -> list[dict[str, Any]]:
    (group,) = router.get("/health").json()["groups"].values()
    found: list[dict[str, Any]] = group["workers"]
    return found


def live(router: Server) -> list[int]:
    return [rank for rank, worker in enumerate(workers_of(router)) if worker["up"]]


def sent_to_first(router: Server) -> int:
    return int(workers_of(router)[0]["in_flight"])


def generated_tokens(fleet: Fleet, rank: int) -> float:
    """Tokens that a worker has generated since it last started."""
    url = fleet.workers[rank].partition(",")[0]
    text = httpx.get(f"{url}/metrics").text
    (count,) = re.findall(r"^vllm:generation_tokens_total\S* (\S+)$", text, re.MULTILINE)
    return float(count)


def assert_idle(fleet: Fleet, router: Server) -> None:
    """Nothing in flight, nothing waiting, every slot free, on both sides."""
    wait_until(lambda: fleet.unfinished() == 0, 10, "the engines are idle")
    wait_until(
        lambda: all(worker["free_slots"] == SLOTS for worker in workers_of(router)),
        10,
        "all slots are free",
    )
    (group,) = router.get("/health").json()["groups"].values()
    assert group["pool_requests"] == 0
    assert [worker["in_flight"] for worker in group["workers"]] == [0] * len(group["workers"])
    assert [worker["load_tokens"] for worker in group["workers"]] == [0] * len(group["workers"])


def body(output_tokens: int, *, stream: bool = True) -> bytes:
    return json.dumps(
        {
            "model": "emulated",
            "prompt": [1] * 50,
            "max_tokens": 1000,
            "stream": stream,
            "vllm_xargs": {"evenstep_output_tokens": output_tokens},
        }
    ).encode()


async def ask(client: HttpClient, router: Server, seen: Seen, request: bytes) -> Seen:
    response = await client.request("POST", router.url, "/v1/completions", HEADERS, request)
    try:
        seen.status = response.status
        async for chunk in response:
            seen.body += chunk
            seen.first.set()
    finally:
        response.close()
    return seen


@pytest.mark.parametrize("mid_event", [False, True])
async def test_worker_killed_mid_stream(tmp_path: Path, mid_event: bool) -> None:
    started, waiting = WORKERS * SLOTS, 6
    with cluster(tmp_path, "--time-scale", "4") as (fleet, router):
        client = HttpClient()
        seen = [Seen() for _ in range(started + waiting)]
        async with asyncio.timeout(60):
            first = [asyncio.create_task(ask(client, router, s, body(120))) for s in seen[:started]]
            await asyncio.gather(*(one.first.wait() for one in seen[:started]))
            rest = [asyncio.create_task(ask(client, router, s, body(20))) for s in seen[started:]]
            await asyncio.to_thread(fleet.fault, 0, "kill", mid_event=mid_event)
            await asyncio.gather(*first, *rest)

        broken = [one for one in seen if not one.complete]
        assert len(broken) == SLOTS
        for one in broken:
            assert one in seen[:started]
            assert one.errors == 1
            assert one.events[-1]["error"]["code"] == 502
        assert live(router) == [1, 2]

        fleet.restore(0)
        wait_until(lambda: live(router) == [0, 1, 2], 10, "the worker is used again")
        async with asyncio.timeout(60):
            again = await asyncio.gather(
                *(ask(client, router, Seen(), body(20)) for _ in range(started))
            )
        assert all(one.complete for one in again)
        assert generated_tokens(fleet, 0) > 0
        await asyncio.to_thread(assert_idle, fleet, router)
        await client.aclose()


async def test_requests_not_yet_started_go_to_others(tmp_path: Path) -> None:
    """Steps stop, so that requests sit on the worker without a first byte; then it dies."""
    with cluster(tmp_path, "--no-barrier", "--time-scale", "4") as (fleet, router):
        client = HttpClient()
        await asyncio.to_thread(fleet.fault, 0, "hang")
        seen = [Seen() for _ in range(WORKERS * SLOTS)]
        async with asyncio.timeout(60):
            asked = [asyncio.create_task(ask(client, router, one, body(30))) for one in seen]
            await asyncio.to_thread(
                wait_until,
                lambda: workers_of(router)[0]["in_flight"] > 0,
                10,
                "some are sent there",
            )
            await asyncio.to_thread(fleet.fault, 0, "kill")
            await asyncio.gather(*asked)
        assert all(one.complete for one in seen)
        assert live(router) == [1, 2]
        await client.aclose()


async def test_no_worker_left(tmp_path: Path) -> None:
    with cluster(tmp_path, "--time-scale", "4", workers=1) as (fleet, router):
        client = HttpClient()
        seen = [Seen() for _ in range(SLOTS + 2)]
        async with asyncio.timeout(60):
            asked = [asyncio.create_task(ask(client, router, one, body(200))) for one in seen]
            await asyncio.gather(*(one.first.wait() for one in seen[:SLOTS]))
            await asyncio.to_thread(fleet.fault, 0, "kill")
            await asyncio.gather(*asked)
        assert [one.errors for one in seen[:SLOTS]] == [1] * SLOTS
        assert [one.status for one in seen[SLOTS:]] == [503, 503]
        refused = await ask(client, router, Seen(), body(1))
        assert refused.status == 503
        assert json.loads(refused.body)["error"]["type"] == "ServiceUnavailableError"
        assert router.get("/health").status_code == 503
        await client.aclose()


async def test_thousand_requests_with_aborts(tmp_path: Path) -> None:
    """Every tenth client leaves: while it waits, before its first byte, or in mid-answer."""
    rng = random.Random(1)
    with cluster(tmp_path) as (fleet, router):
        client = HttpClient()
        room = asyncio.Semaphore(40)
        aborted = completed = 0

        async def one(number: int) -> None:
            nonlocal aborted, completed
            leaves_after_s = rng.uniform(0, 0.15) if number % 10 == 0 else None
            request = body(rng.randint(20, 40), stream=number % 4 != 0)
            async with room:
                seen = Seen()
                try:
                    async with asyncio.timeout(leaves_after_s):
                        await ask(client, router, seen, request)
                except TimeoutError:
                    aborted += 1
                except UpstreamError as error:
                    raise AssertionError(f"request {number}: {error}") from error
                else:
                    assert seen.status == 200
                    completed += 1

        async with asyncio.timeout(100):
            await asyncio.gather(*(one(number) for number in range(1000)))
        assert aborted + completed == 1000
        assert aborted > 50
        await asyncio.to_thread(assert_idle, fleet, router)
        await client.aclose()
