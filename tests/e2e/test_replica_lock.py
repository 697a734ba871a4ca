"""Three replicas with a file lock: one decides, the others pass on to it and take over."""

import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.support.certificates import certificate
from tests.support.fleet import Fleet, running_fleet, worker_flags
from tests.support.server import Server, free_port, running_router, starting, wait_until

ASKED = {"model": "emulated", "prompt": [1] * 20, "max_tokens": 4}
LONG = {**ASKED, "stream": True, "max_tokens": 60, "ignore_eos": True}


def decides(router: Server) -> bool:
    return bool(router.get("/ready").json().get("decides"))


def ask(router: Server, asked: object = ASKED, **headers: str) -> httpx.Response:
    return httpx.post(f"{router.url}/v1/completions", json=asked, headers=headers, timeout=60)


def slow(fleet: Fleet) -> None:
    """A step takes a second: what is asked does not end before it is wanted."""
    for rank in range(2):
        fleet.fault(rank, "slow", factor=200)


def restore(fleet: Fleet) -> None:
    for rank in range(2):
        fleet.restore(rank)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with running_fleet(tmp_path, "--workers", "2", "--slots", "1") as fleet:
        yield fleet


@contextlib.contextmanager
def running_replicas(folder: Path, fleet: Fleet, *flags: str) -> Iterator[list[Server]]:
    """The first one decides."""
    (folder / "lock").write_text("\n")  # nobody has it
    given = ("--replica-lock", f"file:{folder}/lock", "--policy", "jsq", *worker_flags(fleet))
    with contextlib.ExitStack() as routers:
        started = []
        for _ in range(3):
            started.append(routers.enter_context(running_router(folder, *given, *flags)))
            wait_until(lambda: decides(started[0]), 60, "the first one decides")
        yield started


@pytest.fixture
def replicas(tmp_path: Path, fleet: Fleet) -> Iterator[list[Server]]:
    with running_replicas(tmp_path, fleet) as replicas:
        yield replicas


def next_leader(replicas: list[Server]) -> Server:
    wait_until(lambda: any(map(decides, replicas)), 60, "another one decides")
    return next(each for each in replicas if decides(each))


def knows(follower: Server, leader: str) -> bool:
    known = follower.get("/health").json()
    states = [worker["snapshots"] for worker in known["groups"]["default"]["workers"]]
    return bool(known["replica"]["leader"] == leader) and states == ["fresh", "fresh"]


def test_a_follower_knows_its_workers_and_is_ready(replicas: list[Server]) -> None:
    leader, *followers = replicas
    name = leader.get("/health").json()["replica"]["name"]
    for follower in followers:
        wait_until(partial(knows, follower, name), 60, "it knows leader and workers")
        assert follower.get("/ready").status_code == 200
    told = [router.get("/metrics").text for router in replicas]
    assert ["evenstep_replica_decides 1.0" in text for text in told] == [True, False, False]


def test_a_follower_passes_requests_on_and_answers_as_they_come(replicas: list[Server]) -> None:
    leader, follower, _ = replicas
    answer = ask(follower, **{"X-Request-ID": "mine"})
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == "mine"
    assert answer.headers.keys() >= {"content-length", "x-request-id"}
    assert answer.json()["usage"]["completion_tokens"] == 4
    bad = ask(follower, {"prompt": 7})
    assert (bad.status_code, bad.json()) == (400, ask(leader, {"prompt": 7}).json())
    with httpx.stream("POST", f"{follower.url}/v1/completions", json=LONG, timeout=60) as stream:
        events = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
    assert events[-1] == "[DONE]"
    assert len(events) > 40
    assert "@http://127.0.0.1:" in follower.log.read_text()  # who answered


def test_what_was_passed_on_is_not_passed_on_again(replicas: list[Server]) -> None:
    leader, follower, _ = replicas
    name = leader.get("/health").json()["replica"]["name"]
    refused = ask(follower, **{"X-Evenstep-Passed-On": "1"})
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["message"] == f"another replica decides: {name}; retry"


def test_a_client_that_leaves_a_follower_frees_its_slot(
    fleet: Fleet, replicas: list[Server]
) -> None:
    slow(fleet)
    url = f"{replicas[1].url}/v1/completions"
    asked = {**LONG, "max_tokens": 2_000}
    with httpx.stream("POST", url, json=asked, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert fleet.unfinished() == 1
    wait_until(lambda: not fleet.unfinished(), 60, "the engine has ended it")


def test_requests_outlive_a_leader_that_is_killed(fleet: Fleet, replicas: list[Server]) -> None:
    leader, *others = replicas
    slow(fleet)
    with ThreadPoolExecutor(8) as clients:
        # Two run, the others wait; none has got a byte.
        asked = [clients.submit(ask, others[at % 2], {**LONG, "stream": False}) for at in range(4)]
        wait_until(lambda: leader.get("/load").json()["server_load"] == 4, 60, "the leader has all")
        leader.kill()
        next_leader(others)
        restore(fleet)
        assert [each.result().status_code for each in asked] == [200] * 4


def test_one_that_ends_hands_over_what_waits_and_keeps_its_answers(
    fleet: Fleet, replicas: list[Server]
) -> None:
    leader, *others = replicas
    slow(fleet)
    with (
        ThreadPoolExecutor(8) as clients,
        httpx.stream("POST", f"{leader.url}/v1/completions", json=LONG, timeout=60) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        # None of them ends before all have come.
        long = {**LONG, "stream": False}
        asked = [clients.submit(ask, each, long) for each in (*replicas, *replicas)]
        wait_until(lambda: leader.get("/load").json()["server_load"] == 7, 60, "the leader has all")
        leader.process.send_signal(signal.SIGTERM)
        next_leader(others)
        restore(fleet)
        assert [each.result().status_code for each in asked] == [200] * 6
        events = [line.removeprefix("data: ") for line in lines if line]
    assert leader.process.wait(timeout=60) == 0, leader.log_tail()
    assert events[-1] == "[DONE]"
    assert not any("error" in json.loads(event) for event in events[:-1])


def test_keys_and_certificates_go_along(tmp_path: Path, fleet: Fleet) -> None:
    (tmp_path / "lock").write_text("\n")
    cert, key = certificate(tmp_path, "evenstep.example")
    given = ("--replica-lock", f"file:{tmp_path}/lock", "--policy", "jsq", *worker_flags(fleet))
    flags = (*given, "--tls-cert", str(cert), "--tls-key", str(key))
    keys = {"EVENSTEP_API_KEYS": "team sk-team-0123456789"}
    with contextlib.ExitStack() as routers, httpx.Client(verify=False, timeout=60) as http:
        urls = []
        for _ in range(2):
            port = free_port()
            command = [sys.executable, "-m", "router.cli", "serve", "--port", str(port), *flags]
            log = tmp_path / f"router-{port}.log"
            routers.enter_context(starting(command, port, log, keys))
            url = f"https://127.0.0.1:{port}"

            def ready(url: str = url) -> bool:
                with contextlib.suppress(httpx.HTTPError):
                    return http.get(f"{url}/ready").status_code == 200
                return False

            wait_until(ready, 60, "it is ready")
            urls.append(url)
        assert not http.get(f"{urls[1]}/ready").json()["decides"]
        shown = {"authorization": "Bearer sk-team-0123456789"}
        answers = [
            http.post(f"{urls[1]}/v1/completions", json=ASKED, headers=headers).status_code
            for headers in (shown, {})
        ]
        assert answers == [200, 401]

        def counted() -> bool:
            texts = [http.get(f"{url}/metrics").text for url in urls]
            return all('requests_total{key="team"} 1.0' in text for text in texts)

        wait_until(counted, 60, "both have counted it: the leader knew the key, too")
