"""One model in several groups: each serves the requests that wait for it."""

import asyncio
import re
from contextlib import ExitStack
from pathlib import Path

import httpx

from tests.support.fleet import Fleet, running_fleet
from tests.support.server import Server, running_router, wait_until

GROUPS = "abc"
SLOTS = 4
TIMEOUT_S = 120.0
FLEET = ("--workers", "2", "--slots", str(SLOTS), "--step-time", "5e-3,1e-8")


def assigned(router: Server) -> dict[str, float]:
    """Requests sent to workers, by group."""
    rows = re.findall(
        r'^evenstep_requests_assigned_total{group="(\w+)"} (\S+)$',
        router.get("/metrics").text,
        re.MULTILINE,
    )
    return {group: float(number) for group, number in rows}


def up(router: Server) -> float:
    """Workers that can be used."""
    rows = re.findall(r"^evenstep_worker_up{.*} (\S+)$", router.get("/metrics").text, re.MULTILINE)
    return sum(map(float, rows))


async def ask(http: httpx.AsyncClient, tokens: int) -> int:
    body = {"model": "emulated", "prompt": [5] * 50, "max_tokens": tokens, "ignore_eos": True}
    return (await http.post("/v1/completions", json=body)).status_code


def test_all_groups_serve_it_and_one_that_dies_leaves_its_requests_to_the_others(
    tmp_path: Path,
) -> None:
    with ExitStack() as stack:
        fleets: dict[str, Fleet] = {
            name: stack.enter_context(running_fleet(tmp_path, *FLEET)) for name in GROUPS
        }
        workers = [
            flag
            for name, fleet in fleets.items()
            for spec in fleet.workers
            for flag in ("--worker", spec.replace("group=default", f"group={name}"))
        ]
        router = stack.enter_context(running_router(tmp_path, *workers))
        wait_until(lambda: up(router) == 2 * len(GROUPS), 60.0, "all workers are up")

        async def load() -> list[int]:
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(
                base_url=router.url, timeout=TIMEOUT_S, limits=limits
            ) as http:
                running = [asyncio.ensure_future(ask(http, 40 + 10 * i % 70)) for i in range(60)]

                def all_work() -> bool:
                    return min(assigned(router).get(name, 0) for name in GROUPS) >= SLOTS

                await asyncio.to_thread(wait_until, all_work, 60.0, "all groups work")
                for rank in (0, 1):
                    await asyncio.to_thread(fleets["a"].fault, rank, "kill")
                codes = list(await asyncio.gather(*running))
                return codes + [await ask(http, 4) for _ in range(8)]

        codes = asyncio.run(load())
        assert codes.count(200) == len(codes) == 68
        assert 'evenstep_pool_requests{group="b"} 0' in router.get("/metrics").text
