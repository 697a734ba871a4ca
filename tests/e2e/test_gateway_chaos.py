"""Requests by the thousand through the real Envoy and a picker: each ends once.

Engines fail, pickers and engines are replaced meanwhile.
"""

import asyncio
import random
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event
from typing import Any

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
    """How a request ended: complete, left by its client, broken off, or its status."""
    body = {"model": "emulated", "prompt": [1] * dice.randint(1, 50)}
    told = {"max_tokens": dice.randint(1, 60), "stream": dice.random() < 0.5}
    leaves_s = dice.uniform(0, 0.2) if dice.random() < 0.1 else None
    try:
        async with asyncio.timeout(leaves_s):
            answer = await http.post("/v1/completions", json={**body, **told})
    except TimeoutError:
        return "left"
    except httpx.RemoteProtocolError:
        return "broken"
    whole = b"[DONE]" in answer.content or b'"usage"' in answer.content
    return "complete" if answer.status_code == 200 and whole else str(answer.status_code)


async def asked(
    url: str, count: int, clients: int, over: Event | None = None, ends: Counter[str] | None = None
) -> Counter[str]:
    """How so many requests have ended; if something is to happen meanwhile, until it is over."""
    left, dice = iter(range(count)), random.Random(count)
    ends = Counter() if ends is None else ends
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits, trust_env=False) as http:

        async def client() -> None:
            while next(left, None) is not None or not (over is None or over.is_set()):
                ends[await ask(http, dice)] += 1

        await asyncio.gather(*(client() for _ in range(clients)))
    return ends


@contextmanager
def asking(url: str, clients: int) -> Iterator[Counter[str]]:
    """Requests go on until the block ends; this counts how they have ended so far, then all."""
    over, ends = Event(), Counter[str]()
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(asyncio.run, asked(url, 200, clients, over, ends))
        try:
            yield ends
        finally:
            over.set()
        asking.result()


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

    async def run(envoy: str, fleet: Fleet, picker: Server) -> list[httpx.Response]:
        begun: list[httpx.Response] = []
        body = {"model": "emulated", "prompt": [1], "max_tokens": 1500, "stream": True}

        async def one(client: httpx.AsyncClient) -> httpx.Response:
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                begun.append(answer)
                await answer.aread()
            return answer

        def two_run_and_two_wait() -> bool:
            waiting = samples(picker, "evenstep_pool_requests").get('group="default"')
            return (len(begun), waiting) == (2, 2)

        async with httpx.AsyncClient(base_url=envoy, timeout=120, trust_env=False) as client:
            # In minutes: those that run are not to end before all is as it should be.
            await asyncio.to_thread(fleet.slow_down, 100)
            every = [asyncio.create_task(one(client)) for _ in range(4)]
            await asyncio.to_thread(
                wait_until, two_run_and_two_wait, 60, "two have begun, and two wait"
            )
            picker.kill()
            await asyncio.to_thread(fleet.restore)
            return await asyncio.gather(*every)

    with running_fleet(
        tmp_path, "--workers", "2", "--slots", "1", "--step-time", "2e-3,0"
    ) as fleet:
        workers = [part for worker in fleet.workers for part in ("--worker", worker)]
        command = [sys.executable, "-m", "router.cli", "pick", "--port", str(http)]
        command += ["--grpc-port", str(grpc), *workers]
        with running_envoy(tmp_path, http, grpc, urls(fleet), ext_proc=ext_proc) as envoy:
            with running(command, http, tmp_path / "picker.log", ready_s=180) as picker:
                answers = asyncio.run(run(envoy.url, fleet, picker))
            statuses = sorted(answer.status_code for answer in answers)
            assert statuses == [200, 200, *[500 if ext_proc else 503] * 2]
            assert all(b"[DONE]" in each.content for each in answers if each.status_code == 200)
            with running(command, http, tmp_path / "next.log", ready_s=180):
                again = asyncio.run(asked(envoy.url, 4, 2))
            assert again.total() == again["complete"] + again["left"]


def nothing_is_booked(picker: Server, fleet: Fleet) -> None:
    """All has ended: at gateways, workers and engines."""

    def all_up() -> bool:
        return sum(samples(picker, "evenstep_worker_up").values()) == len(fleet.workers)

    # A worker that is down shows no load.
    wait_until(all_up, 60, "every worker is up again")
    wait_until(lambda: samples(picker, "evenstep_picks") == {"": 0}, 90, "all have ended")
    wait_until(lambda: fleet.unfinished() == 0, 60, "idle engines")
    in_flight = samples(picker, "evenstep_worker_in_flight")
    assert len(in_flight) == len(fleet.workers)
    assert not sum(in_flight.values())


@FORMS
def test_engines_that_fail_book_no_slot(tmp_path: Path, ext_proc: bool) -> None:
    with (
        running_fleet(tmp_path, *FLEET, "--no-barrier") as fleet,
        running_picker(tmp_path, fleet.workers) as (picker, grpc),
        running_envoy(tmp_path, picker.port, grpc, urls(fleet), ext_proc=ext_proc) as envoy,
    ):

        def up() -> float:
            return sum(samples(picker, "evenstep_worker_up").values())

        def busy() -> bool:
            return int(fleet.state()["workers"][0]["running"]) > 4

        kills = 0
        with asking(envoy.url, 24) as ends:
            # None of those that run may have begun its answer.
            while not ends["broken"] and kills < 10:
                wait_until(busy, 60, "the first one answers many")
                fleet.fault(0, "kill")
                kills += 1
                wait_until(lambda: up() == 2, 60, "it is seen to be down")
                fleet.restore(0)
                wait_until(lambda: up() == 3, 60, "it is up again")
            fleet.fault(1, "error", status=500)
            before = outcomes(picker).get("completed", 0)
            wait_until(
                lambda: outcomes(picker).get("completed", 0) > before + 50, 60, "the others serve"
            )
            fleet.restore(1)

        # Answers that had begun break off; all others come from the next endpoint.
        assert ends.keys() <= {"complete", "left", "broken"}
        assert 0 < ends["broken"] <= 8 * kills
        assert ends["complete"] > 100
        nothing_is_booked(picker, fleet)


def both(http: Sequence[int], grpc: Sequence[int]) -> Callable[[Any], None]:
    """A change of Envoy's configuration: it asks either picker."""

    def change(config: Any) -> None:
        ports_of = {"picker": http, "picker_grpc": grpc}
        for cluster in config["static_resources"]["clusters"][:2]:
            ports = ports_of[cluster["name"]]
            cluster["load_assignment"]["endpoints"][0]["lb_endpoints"] = [
                {
                    "endpoint": {
                        "address": {"socket_address": {"address": "127.0.0.1", "port_value": each}}
                    }
                }
                for each in ports
            ]

    return change


@FORMS
def test_pickers_and_engines_are_replaced_without_a_lost_request(
    tmp_path: Path, ext_proc: bool
) -> None:
    http, grpc, admin = ([free_port(), free_port()] for _ in range(3))
    with running_fleet(tmp_path, *FLEET, "--no-barrier") as fleet, ExitStack() as stack:

        def start(at: int) -> Server:
            workers = [
                flag
                for rank, worker in enumerate(fleet.workers)
                for flag in ("--worker", f"{worker},id=w{rank}")
            ]
            command = [sys.executable, "-m", "router.cli", "pick", *workers]
            command += ["--port", str(http[at]), "--grpc-port", str(grpc[at])]
            command += ["--admin-port", str(admin[at]), "--drain-delay", "3"]
            log = tmp_path / f"picker-{at}.log"
            return stack.enter_context(running(command, http[at], log, ready_s=180))

        def served(picker: Server, more: int) -> None:
            """It has completed so many more."""
            before = outcomes(picker).get("completed", 0)
            wait_until(
                lambda: outcomes(picker).get("completed", 0) >= before + more, 60, "it serves"
            )

        def replace_engine(rank: int, picker: Server) -> None:
            port = f"http://127.0.0.1:{admin[1]}/workers"

            def listed(rank: int) -> dict[str, Any]:
                worker: dict[str, Any] = httpx.get(port, timeout=60).json()["workers"][rank]
                return worker

            def state(name: str) -> bool:
                return bool(listed(rank)["state"] == name)

            def idle() -> bool:
                worker = fleet.state()["workers"][rank]
                return not (worker["running"] or worker["waiting"] or listed(rank)["requests"])

            assert httpx.post(f"{port}/w{rank}/drain", timeout=60).is_success
            wait_until(idle, 60, "it is idle")
            fleet.fault(rank, "kill")
            served(picker, 10)
            fleet.restore(rank)
            assert httpx.post(f"{port}/w{rank}/undrain", timeout=60).is_success
            wait_until(lambda: state("up"), 60, "it is up")
            served(picker, 10)

        first = start(0)
        asks_both = both(http, grpc)
        envoy = stack.enter_context(
            running_envoy(
                tmp_path, http[0], grpc[0], urls(fleet), ext_proc=ext_proc, change=asks_both
            )
        )
        with asking(envoy.url, 16) as ends:
            served(first, 20)
            second = start(1)
            served(second, 20)
            first.process.send_signal(signal.SIGTERM)
            assert first.process.wait(timeout=60) == 0, first.log_tail()
            served(second, 20)
            for rank in range(len(fleet.workers)):
                replace_engine(rank, second)

        assert ends.keys() <= {"complete", "left"}
        assert ends["complete"] > 100
        nothing_is_booked(second, fleet)
