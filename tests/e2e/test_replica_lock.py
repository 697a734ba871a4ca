"""Two replicas with a file lock: one decides, the other takes over."""

import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.fleet import Fleet, running_fleet, worker_flags
from tests.support.server import Server, running_router, wait_until

ASKED = {"model": "emulated", "prompt": [1] * 20, "max_tokens": 4}


def ready(router: Server) -> bool:
    return router.get("/ready").status_code == 200


def ask(router: Server) -> httpx.Response:
    return httpx.post(f"{router.url}/v1/completions", json=ASKED, timeout=30)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with running_fleet(tmp_path, "--workers", "2", "--slots", "4") as fleet:
        yield fleet


@pytest.fixture
def replicas(tmp_path: Path, fleet: Fleet) -> Iterator[list[Server]]:
    """The first one decides."""
    lock = ("--replica-lock", f"file:{tmp_path}/lock", "--policy", "jsq", *worker_flags(fleet))
    with contextlib.ExitStack() as routers:
        started = []
        for _ in range(2):
            started.append(routers.enter_context(running_router(tmp_path, *lock)))
            wait_until(lambda: ready(started[0]), 30, "the first one decides")
        yield started


def test_a_follower_knows_its_workers_and_sends_clients_on(replicas: list[Server]) -> None:
    leader, follower = replicas
    assert ask(leader).status_code == 200
    refused = ask(follower)
    name = leader.get("/health").json()["replica"]["name"]
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["message"] == f"another replica decides: {name}; retry"
    assert follower.get("/ready").status_code == 503
    known = follower.get("/health")
    assert known.status_code == 200
    assert known.json()["replica"]["leader"] == name
    workers = known.json()["groups"]["default"]["workers"]
    assert [worker["snapshots"] for worker in workers] == ["fresh", "fresh"]
    decides = [router.get("/metrics").text for router in replicas]
    assert ["evenstep_replica_decides 1.0" in text for text in decides] == [True, False]


def test_another_takes_over_from_one_that_is_killed(replicas: list[Server]) -> None:
    leader, follower = replicas
    leader.kill()
    wait_until(lambda: ready(follower), 10, "the other one decides")
    assert ask(follower).status_code == 200


def test_one_that_ends_hands_over_and_keeps_its_answers(
    fleet: Fleet, replicas: list[Server]
) -> None:
    leader, follower = replicas
    asked = {**ASKED, "stream": True, "max_tokens": 60, "ignore_eos": True}
    fleet.fault(0, "slow", factor=20)
    fleet.fault(1, "slow", factor=20)
    with httpx.stream("POST", f"{leader.url}/v1/completions", json=asked, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        leader.process.send_signal(signal.SIGTERM)
        wait_until(lambda: ready(follower), 10, "the other one decides")
        assert ask(follower).status_code == 200
        events = [line.removeprefix("data: ") for line in lines if line]
    assert leader.process.wait(timeout=30) == 0, leader.log_tail()
    assert events[-1] == "[DONE]"
    assert not any("error" in json.loads(event) for event in events[:-1])
