"""Prefill and decode workers that die, hang and come back, and clients that leave in any phase."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from router.engines.http_client import HttpClient
from tests.support.chaos import Seen, ask
from tests.support.fleet import Fleet, running_fleet, worker_flags
from tests.support.server import Server, running_router, wait_until

DECODES, PREFILLS, SLOTS = 3, 2, 8
KV_EXPIRY_S = 2.0
FLEET = (
    *("--workers", str(DECODES), "--prefill-workers", str(PREFILLS), "--slots", str(SLOTS)),
    *("--prefill-step-time", "2e-3,1e-5", "--kv-transfer-time", "1e-3,1e-6"),
    *("--kv-expiry", str(KV_EXPIRY_S)),
)
ROUTER = (
    *("--health-interval", "0.2", "--health-timeout", "0.3"),
    *("--kv-expiry", str(KV_EXPIRY_S)),
)


@contextmanager
def cluster(folder: Path) -> Iterator[tuple[Fleet, Server]]:
    with (
        running_fleet(folder, *FLEET) as fleet,
        running_router(folder, *worker_flags(fleet), *ROUTER) as router,
    ):
        wait_until(lambda: all_up(router), 60, "all workers are up")
        yield fleet, router


def workers_of(router: Server) -> list[dict[str, Any]]:
    groups = router.get("/health").json()["groups"].values()
    return [worker for group in groups for worker in group["workers"]]


def all_up(router: Server) -> bool:
    return all(worker["up"] for worker in workers_of(router))


def idle(router: Server) -> bool:
    """Nothing waits, runs, or is kept for anybody."""
    groups = router.get("/health").json()["groups"].values()
    return not any(group["pool_requests"] for group in groups) and not any(
        worker["in_flight"] or worker["load_tokens"] or worker["kept_tokens"]
        for worker in workers_of(router)
    )


def assert_idle(fleet: Fleet, router: Server) -> None:
    wait_until(lambda: fleet.unfinished() == 0, 60, "the engines are idle")
    wait_until(lambda: idle(router), 60, "the router is idle")
    wait_until(lambda: held_tokens(fleet) == 0, 60, "no engine keeps KV")


def held_tokens(fleet: Fleet) -> int:
    return sum(worker["kv_used_tokens"] for worker in fleet.state()["workers"])


def metric(router: Server, name: str, group: str) -> float:
    start = f'evenstep_{name}{{group="{group}"'
    lines = router.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(start))


def body(rng: random.Random) -> bytes:
    fields = {
        "model": "emulated",
        "prompt": [1] * rng.randint(1, 400),
        "max_tokens": 1000,
        "stream": rng.random() < 0.7,
        "vllm_xargs": {"evenstep_output_tokens": rng.randint(1, 30)},
    }
    if rng.random() < 0.1:
        fields["echo"] = True
    return json.dumps(fields).encode()


def outcome(seen: Seen) -> str:
    """How a request ended; fails if it did not end exactly once."""
    if seen.status != 200:
        return str(seen.status)
    if not seen.body.startswith(b"data:"):
        assert json.loads(seen.body)["usage"]["completion_tokens"] > 0
        return "complete"
    if seen.complete:
        return "complete"
    assert seen.errors == 1, seen.body
    return "broken off"


@pytest.mark.timeout(280)
async def test_every_request_ends_once_whatever_fails(tmp_path: Path) -> None:
    rng = random.Random(3)
    outcomes: Counter[str] = Counter()
    with cluster(tmp_path) as (fleet, router):
        client, room = HttpClient(), asyncio.Semaphore(40)

        async def one(number: int) -> None:
            leaves_after_s = rng.uniform(0, 0.3) if number % 10 == 0 else None
            async with room:
                seen = Seen()
                try:
                    async with asyncio.timeout(leaves_after_s):
                        await ask(client, router, seen, body(rng))
                except TimeoutError:
                    outcomes["left"] += 1
                else:
                    outcomes[outcome(seen)] += 1

        async def fail(ended: asyncio.Event) -> int:
            count = 0
            while not ended.is_set():
                rank = rng.randrange(DECODES + PREFILLS)
                await asyncio.to_thread(fleet.fault, rank, rng.choice(("kill", "hang")))
                await asyncio.sleep(rng.uniform(0.1, 0.8))
                await asyncio.to_thread(fleet.restore, rank)
                await asyncio.sleep(rng.uniform(0.1, 0.4))
                count += 1
            return count

        def all_seen() -> bool:
            """Whether faults have hit prompts before their computing and after it."""
            names = ("requests_returned_total", "prefills_repeated_total")
            return all(metric(router, name, "default/prefill") > 0 for name in names)

        ended, asked = asyncio.Event(), 0
        async with asyncio.timeout(200):
            failing = asyncio.create_task(fail(ended))
            while asked < 2000 or not await asyncio.to_thread(all_seen):
                await asyncio.gather(*(one(asked + number) for number in range(1000)))
                asked += 1000
            ended.set()
            faults = await failing
        assert sum(outcomes.values()) == asked
        assert set(outcomes) <= {"complete", "left", "broken off", "500", "502", "503"}, outcomes
        # On a slow machine there is time for more faults: each ends one engine's streams at most.
        broken = asked - outcomes["complete"] - outcomes["left"]
        assert broken <= SLOTS * faults, (outcomes, faults)
        assert outcomes["left"] <= asked / 10
        assert faults > 5
        await asyncio.to_thread(wait_until, lambda: all_up(router), 60, "all workers are up again")
        await asyncio.to_thread(assert_idle, fleet, router)
        assert metric(router, "policy_errors_total", "default") == 0
        last = await ask(client, router, Seen(), body(random.Random(1)))
        assert outcome(last) == "complete"
        await client.aclose()
        assert_no_bug(router)


def assert_no_bug(router: Server) -> None:
    """Nothing failed in the router itself: all that failed were workers."""
    log = router.log.read_text(errors="replace")
    assert "Traceback" not in log, router.log_tail()
    assert "never retrieved" not in log, router.log_tail()
    assert "never awaited" not in log, router.log_tail()


@pytest.mark.parametrize("fault", ["kill", "hang"])
async def test_without_prefill_workers_others_compute_the_prompts(
    tmp_path: Path, fault: str
) -> None:
    with cluster(tmp_path) as (fleet, router):
        client, rng = HttpClient(), random.Random(5)
        for rank in range(DECODES, DECODES + PREFILLS):
            await asyncio.to_thread(fleet.fault, rank, fault)
        async with asyncio.timeout(60):
            seen = await asyncio.gather(
                *(ask(client, router, Seen(), body(rng)) for _ in range(40))
            )
        assert [outcome(one) for one in seen] == ["complete"] * 40

        def told() -> list[str]:
            health = router.get("/health").json()
            return [health["status"], health["groups"]["default"]["prompts"]]

        down = ["ok", "here: default/prefill is down"]
        await asyncio.to_thread(wait_until, lambda: told() == down, 60, "all prefills are down")
        assert metric(router, "prefill_fallbacks_total", "default/prefill") > 0
        for rank in range(DECODES, DECODES + PREFILLS):
            await asyncio.to_thread(fleet.restore, rank)
        await asyncio.to_thread(assert_idle, fleet, router)
        await client.aclose()
