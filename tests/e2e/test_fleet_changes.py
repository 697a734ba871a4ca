"""Workers come and go by a seed while clients stream, and whoever looks goes on looking."""

import asyncio
import contextlib
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from loadgen.traces.recordings import load_recording
from router.engines.http_client import HttpClient
from tests.support.chaos import SLOTS, Seen, ask, body
from tests.support.fleet import Fleet, running_fleet
from tests.support.server import Server, free_port, running_router, wait_until

SEED = 8
REQUESTS = 150
TOKENS = 40
CHANGES = 25
NAMES = ("a", "b", "c")
SUMS = re.compile(r"^(evenstep_\w+_total\{[^}]*group=\"default\"[^}]*\}) (\S+)$", re.MULTILINE)
OF_WORKER = re.compile(r"^evenstep_worker_\w+\{.*worker=\"(\w+)\"", re.MULTILINE)


class Operator:
    """Adds, drains and removes, and looks at what is shown meanwhile."""

    def __init__(self, fleet: Fleet, router: Server, admin: str) -> None:
        self.specs = [f"{spec},id={name}" for spec, name in zip(fleet.workers, NAMES, strict=True)]
        self.http = httpx.Client(base_url=admin, timeout=60, trust_env=False)
        self.router = router
        self.sums: dict[str, float] = {}
        self.done: list[str] = []

    def close(self) -> None:
        self.http.close()

    @property
    def states(self) -> dict[str, str]:
        workers = self.http.get("/workers").json()["workers"]
        return {worker["id"]: worker["state"] for worker in workers}

    @property
    def idle(self) -> bool:
        workers = self.http.get("/workers").json()["workers"]
        return [worker["requests"] for worker in workers] == [0] * len(NAMES)

    def change(self, rng: random.Random) -> None:
        """Something that leaves one worker at least to take requests."""
        states = self.states
        up = [name for name, state in states.items() if state == "up"]
        name = rng.choice(NAMES)
        actions: dict[str, Callable[[], httpx.Response]] = {
            "add": lambda: self.http.post("/workers", content=self.specs[NAMES.index(name)]),
            "undrain": lambda: self.http.post(f"/workers/{name}/undrain"),
        }
        if name in states and set(up) - {name}:
            gone = {"drain": "true"}
            actions["drain"] = lambda: self.http.post(f"/workers/{name}/drain")
            actions["remove"] = lambda: self.http.delete(f"/workers/{name}", params=gone)
        action = rng.choice(list(actions))
        answer = actions[action]()
        assert answer.status_code in (200, 201, 202, 404), answer.text
        self.done.append(f"{action} {name}: {answer.status_code}")

    def look(self) -> None:
        """No sum of the group falls, and only who is there has a metric."""
        before = self.states
        text = self.router.get("/metrics").text
        there = {name for name, state in before.items() if state != "joining"}
        assert there & set(self.states) <= set(OF_WORKER.findall(text)) <= set(before)
        sums = {series: float(value) for series, value in SUMS.findall(text)}
        assert {series for series, value in self.sums.items() if value > sums[series]} == set()
        self.sums = sums


async def test_every_stream_is_whole_while_workers_come_and_go(tmp_path: Path) -> None:
    rng, admin_port, recording = random.Random(SEED), free_port(), tmp_path / "run.jsonl"
    flags = ("--admin-port", str(admin_port), "--record", str(recording), "--policy", "jsq")
    with (
        running_fleet(tmp_path, "--workers", "3", "--slots", str(SLOTS), "--no-barrier") as fleet,
        running_router(tmp_path, "--worker", f"{fleet.workers[0]},id=a", *flags) as router,
        contextlib.closing(Operator(fleet, router, f"http://127.0.0.1:{admin_port}")) as operator,
    ):
        client = HttpClient()
        seen = [Seen() for _ in range(REQUESTS)]
        async with asyncio.timeout(120):
            viewing = asyncio.create_task(_view(f"http://127.0.0.1:{admin_port}"))
            asked = [asyncio.create_task(ask(client, router, one, body(TOKENS))) for one in seen]
            for _ in range(CHANGES):
                await asyncio.to_thread(operator.change, rng)
                await asyncio.to_thread(operator.look)
            await asyncio.to_thread(_all_back, operator)
            await asyncio.gather(*asked)
            viewed = await viewing
        told = f"seed {SEED}: {'; '.join(operator.done)}"
        assert all(one.complete for one in seen), told
        assert {_tokens(one) for one in seen} == {TOKENS}
        await asyncio.to_thread(operator.look)
        await asyncio.to_thread(wait_until, lambda: operator.idle, 60, "nothing is in flight")
        await client.aclose()
    assert viewed > 0
    kept = load_recording(recording)
    assert {worker.id for worker in kept.header.groups["default"].workers} == set(NAMES)
    assert len(kept.requests) == REQUESTS
    assert {len(step.loads) for step in kept.steps} == {len(NAMES)}


def _all_back(operator: Operator) -> None:
    """Whoever has left comes again, and all take requests."""
    for name, spec in zip(NAMES, operator.specs, strict=True):
        operator.http.post("/workers", content=spec)
        operator.http.post(f"/workers/{name}/undrain")
    wait_until(lambda: operator.states == dict.fromkeys(NAMES, "up"), 60, "all are up")


async def _view(admin: str) -> int:
    """Look at the page's states for as long as anything changes; how many there were."""
    states = 0
    async with (
        httpx.AsyncClient(timeout=60, trust_env=False) as client,
        client.stream("GET", f"{admin}/events") as stream,
    ):
        async for line in stream.aiter_lines():
            assert not line.startswith(": still here")  # else a state could not be read
            states += line.startswith("data: ")
            if states == 3:
                break
    return states


def _tokens(one: Seen) -> Any:
    texts = [event["choices"] for event in one.events if event is not None]
    return sum(bool(choices and choices[0]["text"]) for choices in texts)
