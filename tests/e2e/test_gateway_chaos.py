"""Requests by the thousand through the real Envoy and a picker: each ends once."""

import asyncio
import random
import re
import sys
from collections import Counter
from pathlib import Path

import httpx
import pytest

from tests.support.envoy import running_envoy, running_picker
from tests.support.fleet import Fleet, running_fleet
from tests.support.server import Server, free_port, running, wait_until

FLEET = ("--workers", "3", "--slots", "8", "--step-time", "2e-3,0")
FORMS = pytest.mark.parametrize("ext_proc", [False, True], ids=["ext_authz", "ext_proc"])


def samples(router: Server, name: str) -> dict[str, float]:
    """A metric, by its labels as they are written."""
    text = router.get("/metrics").text
    found = re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", text, re.MULTILINE)
    return {labels: float(value) for labels, value in found}


def outcomes(router: Server) -> dict[str, int]:
    """How requests of the only group have ended; those ways alone in which some have."""
    counted = samples(router, "evenstep_requests_total").items()
    return {labels.split('"')[3]: int(value) for labels, value in counted if value}


def urls(fleet: Fleet) -> list[str]:
    return [worker.partition(",")[0] for worker in fleet.workers]


async def ask(http: httpx.AsyncClient, dice: random.Random) -> str:
    """How a request ended: complete, left by its client, or its status."""
    body = {"model": "emulated", "prompt": [1] * dice.randint(1, 50)}
    told = {"max_tokens": dice.randint(1, 60), "stream": dice.random() < 0.5}
    leaves_s = dice.uniform(0, 0.2) if dice.random() < 0.1 else None
    try:
        async with asyncio.timeout(leaves_s):
            answer = await http.post("/v1/completions", json={**body, **told})
    except TimeoutError:
        return "left"
    whole = b"[DONE]" in answer.content or b'"usage"' in answer.content
    return "complete" if answer.status_code == 200 and whole else str(answer.status_code)


async def asked(url: str, count: int, clients: int) -> Counter[str]:
    """How so many requests have ended."""
    left, ends, dice = iter(range(count)), Counter[str](), random.Random(count)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits, trust_env=False) as http:

        async def client() -> None:
            for _ in left:
                ends[await ask(http, dice)] += 1

        await asyncio.gather(*(client() for _ in range(clients)))
    return ends


@FORMS
@pytest.mark.parametrize(
    "count", [400, pytest.param(5_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_each_request_ends_once(tmp_path: Path, ext_proc: bool, count: int) -> None:
    with (
        running_fleet(tmp_path, *FLEET) as fleet,
        running_picker(tmp_path, fleet.workers) as (picker, grpc),
        running_envoy(tmp_path, picker.port, grpc, urls(fleet), ext_proc=ext_proc) as envoy,
    ):
        ends = asyncio.run(asked(envoy.url, count, 48))

        assert ends.keys() <= {"complete", "left"}
        assert ends.total() == count
        wait_until(lambda: samples(picker, "evenstep_picks") == {"": 0}, 90, "all have ended")
        wait_until(lambda: fleet.unfinished() == 0, 60, "idle engines")
        told = outcomes(picker)
        # A client may leave before the picker has heard of it, or when all is over.
        assert ends["complete"] <= told["completed"] <= count
        assert told.keys() <= {"completed", "aborted"}
        assert sum(told.values()) <= count
        assert sum(samples(picker, "evenstep_picks_moved_total").values()) == 0


@FORMS
def test_a_picker_that_is_killed_loses_only_what_it_held(tmp_path: Path, ext_proc: bool) -> None:
    http, grpc = free_port(), free_port()

    async def run(envoy: str, kill: asyncio.Event) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=envoy, timeout=120, trust_env=False) as client:
            body = {"model": "emulated", "prompt": [1], "max_tokens": 1500, "stream": True}
            every = [
                asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(4)
            ]
            await asyncio.to_thread(
                wait_until,
                lambda: [w["running"] for w in fleet.state()["workers"]] == [1, 1],
                60,
                "two run",
            )
            await asyncio.to_thread(
                wait_until,
                lambda: samples(picker, "evenstep_pool_requests").get('group="default"') == 2,
                60,
                "two wait",
            )
            kill.set()
            picker.kill()
            return await asyncio.gather(*every)

    with running_fleet(
        tmp_path, "--workers", "2", "--slots", "1", "--step-time", "2e-3,0"
    ) as fleet:
        workers = [part for worker in fleet.workers for part in ("--worker", worker)]
        command = [sys.executable, "-m", "router.cli", "pick", "--port", str(http)]
        command += ["--grpc-port", str(grpc), *workers]
        with running_envoy(tmp_path, http, grpc, urls(fleet), ext_proc=ext_proc) as envoy:
            with running(command, http, tmp_path / "picker.log", ready_s=180) as picker:
                answers = asyncio.run(run(envoy.url, asyncio.Event()))
            statuses = sorted(answer.status_code for answer in answers)
            assert statuses == [200, 200, *[500 if ext_proc else 503] * 2]
            assert all(b"[DONE]" in each.content for each in answers if each.status_code == 200)
            with running(command, http, tmp_path / "next.log", ready_s=180):
                again = asyncio.run(asked(envoy.url, 4, 2))
            assert again.total() == again["complete"] + again["left"]
