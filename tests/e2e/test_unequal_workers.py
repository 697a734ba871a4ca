"""A fleet of three speeds: the fastest free worker is found, by a plan or by what it completes."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.support.chaos import body, workers_of
from tests.support.engine import metric
from tests.support.fleet import running_fleet
from tests.support.server import Server, free_port, running_router, wait_until
from tests.support.unequal import CHAINS, FLEET_FLAGS, RULES, SLOTS, out_of_order, respond, specs

SLOW, FAST, MIDDLE = range(3)
JFFC = ("--policy", "jffc")


def begin(stack: ExitStack, router: Server) -> None:
    """A request that runs until the block ends."""
    client = stack.enter_context(httpx.Client(timeout=60))
    request = client.build_request("POST", f"{router.url}/v1/completions", content=body(1000))
    lines = (line for line in client.send(request, stream=True).iter_lines())
    assert next(lines)
    stack.callback(lines.close)


def in_flight(router: Server) -> list[int]:
    return [int(worker["in_flight"]) for worker in workers_of(router)]


def test_by_the_plan_the_fastest_worker_is_filled_first(tmp_path: Path) -> None:
    with running_fleet(tmp_path, *FLEET_FLAGS) as fleet:
        workers = specs(fleet, planned=True)
        with running_router(tmp_path, *workers, *JFFC) as router, ExitStack() as stack:
            planned = sum(chain.service_rate for chain in CHAINS)
            assert metric(router, "evenstep_worker_service_rate") == pytest.approx(planned)
            seen = []
            for _ in range(2 * SLOTS + 1):
                begin(stack, router)
                seen.append(in_flight(router))
            assert seen[0] == [0, 1, 0]
            assert seen[SLOTS] == [0, SLOTS, 1]
            assert seen[-1] == [1, SLOTS, SLOTS]


def test_without_a_plan_the_rates_are_learned(tmp_path: Path) -> None:
    with running_fleet(tmp_path, *FLEET_FLAGS, "--time-scale", "0.25") as fleet:
        admin = free_port()
        flags = (*specs(fleet, planned=False), *JFFC, "--admin-port", str(admin))
        with running_router(tmp_path, *flags) as router:
            _complete(router, 150)
            listed = httpx.get(f"http://127.0.0.1:{admin}/workers", timeout=60).json()["workers"]
            rates = [worker["estimated_service_rate"] for worker in listed]
            assert rates[FAST] > rates[MIDDLE] > rates[SLOW] > 0
            wait_until(lambda: in_flight(router) == [0, 0, 0], 60, "all have ended")
            with ExitStack() as stack:
                begin(stack, router)
                assert in_flight(router) == [0, 1, 0]


def _complete(router: Server, requests: int) -> None:
    """Short requests, as many at a time as there are slots."""
    with httpx.Client(timeout=60) as client, ThreadPoolExecutor(len(CHAINS) * SLOTS) as asking:
        url, content = f"{router.url}/v1/completions", body(10, stream=False)
        answers = asking.map(lambda _: client.post(url, content=content), range(requests))
        assert all(answer.is_success for answer in answers)


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.5, 0.8])
def test_policies_rank_as_in_the_simulator(load: float, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as runs:
        responses = list(
            runs.map(lambda rule: respond(rule, load, 300, 1, tmp_path / str(rule)), RULES)
        )
    assert not out_of_order(responses, 0.1), responses
