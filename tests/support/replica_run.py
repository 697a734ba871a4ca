"""Three replicas before an emulated fleet, under load; those that decide end or are killed."""

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import httpx

from loadgen.emulator.emulated_fleet import EmulatedFleet
from loadgen.emulator.emulator_settings import EmulatorSettings
from router.core.errors import UpstreamError
from router.core.step_time import StepTime
from router.engines.http_client import HttpClient
from tests.support.emulated import emulated
from tests.support.envoy import envoy_before_replicas
from tests.support.kube_api import serving_kube_api
from tests.support.server import free_port

WORKERS, SLOTS, CLIENTS = 3, 6, 30
STEP = StepTime(base_s=0.02, per_token_s=1e-6)
HEADERS = [(b"content-type", b"application/json")]
PHYSICS = EmulatorSettings(workers=WORKERS, slots=SLOTS, step_time=STEP).described()
# Steps of a mean that is compared, and of the time before that is normal.
_MEAN_STEPS, _NORMAL_STEPS = 50, 300


@dataclass(slots=True)
class Engines:
    """What happens at the engines: requests that came, slots booked twice, loads step by step."""

    came_s: list[float] = field(default_factory=list)
    booked_twice: int = 0
    steps: list[tuple[float, int]] = field(default_factory=list)  # time, imbalance

    def watch(self, fleet: EmulatedFleet) -> None:
        for worker in fleet.workers:
            self._watch(worker)
        (stepper,) = fleet._steppers
        finish = stepper.group.finish

        def finished(*arguments: Any) -> Any:
            done = finish(*arguments)
            loads = [worker.model.engine.used_tokens for worker in fleet.workers]
            self.steps.append((time.monotonic(), sum(max(loads) - load for load in loads)))
            return done

        stepper.group.finish = finished  # type: ignore[method-assign, assignment]

    def _watch(self, worker: Any) -> None:
        submit = worker.submit

        def submitted(*arguments: Any) -> Any:
            answer = submit(*arguments)
            engine = worker.model.engine
            self.came_s.append(time.monotonic())
            self.booked_twice += len(engine.running) + engine.waiting > SLOTS
            return answer

        worker.submit = submitted

    def steps_until_even(self, killed_s: float, first_s: float) -> int:
        """Steps from a new leader's first dispatch to an imbalance as before the kill."""
        before = [tokens for at_s, tokens in self.steps if at_s < killed_s][-_NORMAL_STEPS:]
        after = [tokens for at_s, tokens in self.steps if at_s >= first_s]
        normal = max(_means(before))
        return next((at for at, each in enumerate(_means(after)) if each <= normal), len(after))

    def unevenness(self, killed_s: float, first_s: float) -> float:
        """Mean imbalance from a new leader's first dispatch on, over that before the kill."""
        before = [tokens for at_s, tokens in self.steps if at_s < killed_s][-_NORMAL_STEPS:]
        after = [tokens for at_s, tokens in self.steps if at_s >= first_s][:_NORMAL_STEPS]
        return mean(after) / mean(before)


@dataclass(slots=True)
class Replica:
    """A router process, started again and again on one port."""

    command: list[str]
    url: str
    log: Path
    process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self.command, stdout=log, stderr=log, env=dict(os.environ)
            )

    async def ask(self, http: httpx.AsyncClient, path: str) -> tuple[int, Any]:
        with contextlib.suppress(httpx.HTTPError):
            answer = await http.get(self.url + path)
            return answer.status_code, answer.json()
        return 0, {}

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    async def ended(self) -> int:
        assert self.process is not None
        return await self.process.wait()


@dataclass(slots=True)
class Run:
    """Attributes:
    takeovers_s: from each kill to the first request that reached an engine.
    even_steps: from there to an imbalance as before.
    unevenness: imbalance from there on, over that before.
    broken: answers that broke off, by whether a replica was killed meanwhile.
    whole: number of other answers.
    refused: by a replica that was not about to end, with why.
    """

    replicas: list[Replica]
    engines: Engines
    rng: random.Random
    takeovers_s: list[float] = field(default_factory=list)
    even_steps: list[int] = field(default_factory=list)
    unevenness: list[float] = field(default_factory=list)
    broken: Counter[str] = field(default_factory=Counter)
    whole: int = 0
    refused: list[str] = field(default_factory=list)
    killed_s: list[float] = field(default_factory=list)
    ending: list[Replica] = field(default_factory=list)
    ended: bool = False
    gateway: str = ""  # before all replicas, if there is one

    async def client(self, number: int) -> None:
        """Asks the gateway, or one replica, and while that is down another one."""
        http = HttpClient()
        while not self.ended:
            content = {
                "model": "emulated",
                "prompt": [1] * self.rng.randint(10, 400),
                "stream": True,
                "vllm_xargs": {"evenstep_output_tokens": self.rng.randint(20, 150)},
                "max_tokens": 200,
            }
            await self._asked(http, number, json.dumps(content).encode())
        await http.aclose()

    async def _asked(self, http: HttpClient, at: int, body: bytes) -> None:
        while not self.ended:
            replica, begun, text = self.replicas[at % 3], False, b""
            since_s = time.monotonic()
            with contextlib.suppress(UpstreamError):
                url = self.gateway or replica.url
                answer = await http.request("POST", url, "/v1/completions", HEADERS, body)
                begun = answer.status == 200
                text = await answer.read()
                if not begun and (self.gateway or replica not in self.ending):
                    self.refused.append(text.decode())
            if begun:
                if text.endswith(b"data: [DONE]\n\n") and b'"error"' not in text:
                    self.whole += 1
                else:
                    killed = any(at_s > since_s for at_s in self.killed_s)
                    self.broken["killed" if killed else "others"] += 1
                return
            at += 1
            await asyncio.sleep(0.02)

    async def leader(self, *, but: Sequence[Replica] = ()) -> Replica:
        async with httpx.AsyncClient(timeout=1, trust_env=False) as http:
            while True:
                for each in self.replicas:
                    _, body = await each.ask(http, "/ready") if each not in but else (0, {})
                    if body.get("decides"):
                        return each
                await asyncio.sleep(0.05)

    async def all_know(self) -> None:
        """All replicas are up, and know all workers."""
        async with httpx.AsyncClient(timeout=5, trust_env=False) as http:
            for each in self.replicas:
                while not _knows(await each.ask(http, "/health")):  # noqa: ASYNC110 - as above
                    await asyncio.sleep(0.1)

    async def stall(self) -> None:
        """One that decides stands still until another one does, then goes on."""
        stalled = await self.leader()
        stalled.signal(signal.SIGSTOP)
        await self.leader(but=[stalled])
        self.killed_s.append(time.monotonic())
        served = len(self.engines.came_s)
        await _until(lambda: len(self.engines.came_s) > served + 10)
        stalled.signal(signal.SIGCONT)
        await _until(lambda: len(self.engines.came_s) > served + 100)
        assert await self.leader() is not stalled

    async def round(self) -> None:
        """One that decides ends; while it still answers, the next one is killed."""
        ending = await self.leader()
        self.ending.append(ending)
        ending.signal(signal.SIGTERM)
        victim = await self.leader(but=[ending])
        served = len(self.engines.came_s)
        await _until(lambda: len(self.engines.came_s) > served + 10)
        killed_s = time.monotonic()
        self.killed_s.append(killed_s)
        victim.signal(signal.SIGKILL)
        await victim.ended()
        # Of what the killed one had sent nothing arrives later than this.
        await _until(lambda: self.engines.came_s[-1] > killed_s + 0.05)
        first_s = next(at_s for at_s in self.engines.came_s if at_s > killed_s + 0.05)
        self.takeovers_s.append(first_s - killed_s)
        assert await ending.ended() == 0
        for each in (ending, victim):
            await each.start()
        await self.all_know()
        self.ending.clear()
        steps = len(self.engines.steps)
        await _until(lambda: len(self.engines.steps) > steps + _NORMAL_STEPS)
        self.even_steps.append(self.engines.steps_until_even(killed_s, first_s))
        self.unevenness.append(self.engines.unevenness(killed_s, first_s))


def _means(tokens: Sequence[int]) -> list[float]:
    return [mean(tokens[at : at + _MEAN_STEPS]) for at in range(len(tokens) - _MEAN_STEPS + 1)]


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 - counts send no events
            await asyncio.sleep(0.01)


def _knows(answer: tuple[int, Any]) -> bool:
    status, body = answer
    workers = body["groups"]["default"]["workers"] if status == 200 else []
    return bool(workers) and all(each["snapshots"] == "fresh" for each in workers)


@contextlib.asynccontextmanager
async def replicas_under_load(
    folder: Path, lock: str, seed: int = 1, *, envoy: bool = False
) -> AsyncIterator[Run]:
    """``lock``: file or lease, with the lock's own times; ``envoy``: one is before them."""
    async with (
        emulated(folder, workers=WORKERS, slots=SLOTS, step_time=STEP, barrier=True) as fleet,
        serving_kube_api() as (_, api),
    ):
        (folder / "lock").write_text("\n")  # nobody has it
        given = f"file:{folder}/lock" if lock == "file" else "lease:serving/evenstep"
        flags = [
            "--replica-lock",
            given,
            "--kubernetes-api",
            api,
            "--grace",
            "60",
            "--overcommit",
            "0",
        ]
        for rank in range(WORKERS):
            flags += ["--worker", fleet.worker_spec(rank)]
        replicas = []
        for port in (free_port() for _ in range(3)):
            command = [sys.executable, "-m", "router.cli", "serve", "--port", str(port), *flags]
            log = folder / f"router-{port}.log"
            replicas.append(Replica(command, f"http://127.0.0.1:{port}", log))
            await replicas[-1].start()
        run = Run(replicas, Engines(), random.Random(seed))
        run.engines.watch(fleet)
        stack = contextlib.ExitStack()
        if envoy:
            urls = [each.url for each in replicas]
            run.gateway = stack.enter_context(envoy_before_replicas(folder, urls)).url
        clients = [asyncio.create_task(run.client(number)) for number in range(CLIENTS)]
        try:
            await run.all_know()
            await _until(lambda: len(run.engines.steps) > _NORMAL_STEPS)
            run.refused.clear()
            yield run
        finally:
            run.ended = True
            await asyncio.wait(clients, timeout=60)
            stack.close()
            for each in replicas:
                with contextlib.suppress(ProcessLookupError):
                    each.signal(signal.SIGKILL)
                await each.ended()
        for task in clients:
            task.result()
