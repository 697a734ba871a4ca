"""Clients, an emulated fleet and a real router process, for tests of what goes wrong."""

import asyncio
import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from router.engines.http_client import HttpClient
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
def cluster(
    folder: Path, *fleet_flags: str, workers: int = WORKERS, router_flags: Sequence[str] = ()
) -> Iterator[Any]:
    flags = ("--workers", str(workers), "--slots", str(SLOTS), *fleet_flags)
    with (
        running_fleet(folder, *flags) as fleet,
        running_router(folder, *worker_flags(fleet), *router_flags) as router,
    ):
        ranks = len(fleet.workers)
        wait_until(lambda: len(live(router)) == ranks, 60, "all workers are up")
        yield fleet, router


def workers_of(router: Server) -> list[dict[str, Any]]:
    """Every group's; those that only prefill are one of their own, the last."""
    groups = router.get("/health").json()["groups"]
    return [worker for group in groups.values() for worker in group["workers"]]


def live(router: Server) -> list[int]:
    return [rank for rank, worker in enumerate(workers_of(router)) if worker["up"]]


def sent_to_first(router: Server) -> int:
    return int(workers_of(router)[0]["in_flight"])


def generated_tokens(fleet: Fleet, rank: int) -> float:
    """Tokens that a worker has generated since it last started."""
    url = fleet.workers[rank].partition(",")[0]
    text = httpx.get(f"{url}/metrics", timeout=60).text
    (count,) = re.findall(r"^vllm:generation_tokens_total\S* (\S+)$", text, re.MULTILINE)
    return float(count)


def assert_idle(fleet: Fleet, router: Server) -> None:
    """Nothing in flight, nothing waiting, every slot free, on both sides."""
    wait_until(lambda: fleet.unfinished() == 0, 60, "the engines are idle")
    wait_until(lambda: _idle(router), 60, "the router is idle, and all slots are free")


def _idle(router: Server) -> bool:
    groups = router.get("/health").json()["groups"].values()
    return not any(group["pool_requests"] for group in groups) and all(
        (worker["free_slots"], worker["in_flight"], worker["load_tokens"]) == (SLOTS, 0, 0)
        for group in groups
        for worker in group["workers"]
    )


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
