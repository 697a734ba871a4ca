"""Ray Serve before emulated engines, with the request router that asks the picker."""

import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.chaos import workers_of
from tests.support.fleet import Fleet, running_fleet
from tests.support.ray_serve import Asked, RayCallError, RayServe, running_ray
from tests.support.round_robin import ranks_behind
from tests.support.server import Server, free_port, running_router, wait_until

pytestmark = pytest.mark.timeout(600)

WAIT_S = 60.0
SLOTS, WORKERS = 2, 4
# Far longer than any test.
ENDLESS = 300_000


@dataclass(frozen=True, slots=True)
class Stack:
    """Four emulated engines, of which the first two are ranks behind one URL, and their picker.

    Attributes:
        engines: addresses, that of the ranks at the end.
    """

    fleet: Fleet
    engines: list[str]
    picker: Server

    def in_flight(self) -> list[int]:
        return [each["in_flight"] for each in workers_of(self.picker)]

    def pool(self) -> int:
        return int(self.picker.get("/health").json()["groups"]["default"]["pool_requests"])

    def counted(self, name: str, label: str) -> int:
        """A metric of the picker with this label."""
        lines = re.findall(
            rf"^{name}{{(.*)}} (\S+)", self.picker.get("/metrics").text, re.MULTILINE
        )
        return sum(int(float(value)) for labels, value in lines if label in labels)

    def told(self) -> int:
        """How many ends somebody has told the picker."""
        return self.counted("evenstep_picks_ended_total", 'by="answer"')

    def idle(self) -> None:
        wait_until(lambda: not any(self.in_flight()), WAIT_S, "all ends are told")
        assert self.counted("evenstep_picks_ended_total", "") == self.told()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    # Without snapshots only Ray can tell when a request ends.
    flags = ("--workers", str(WORKERS), "--slots", str(SLOTS), "--no-barrier", "--no-snapshots")
    with running_fleet(folder, *flags, "--step-time", "0.01,0") as fleet:
        ports = [fleet.server.port + rank for rank in range(WORKERS)]
        with ranks_behind(ports[:2]) as ranks:
            urls = [f"http://127.0.0.1:{port}" for port in ports[2:]]
            workers = [*urls, f"{ranks},rank=0", f"{ranks},rank=1"]
            asked = [f"--worker={worker},slots={SLOTS}" for worker in workers]
            asked += ["--grpc-port", str(free_port())]
            with running_router(folder, *asked, name="pick") as picker:
                up = "all engines are up"
                wait_until(lambda: all(each["up"] for each in workers_of(picker)), WAIT_S, up)
                yield Stack(fleet, [url.removeprefix("http://") for url in (*urls, ranks)], picker)


@pytest.fixture(scope="module")
def ray_serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayServe]:
    with running_ray(tmp_path_factory.mktemp("ray") / "log") as started:
        yield started
    assert "Unclosed" not in started.log_tail(200), "its router closes what it opens"


@pytest.fixture(scope="module")
def wide(ray_serve: RayServe, stack: Stack) -> str:
    """Two replicas: the one has an engine, the other an engine and one of two ranks."""
    first, *others = stack.engines
    ray_serve.deploy("wide", [[first], others], url=stack.picker.url, tell="told")
    return "wide"


@pytest.fixture(scope="module")
def narrow(ray_serve: RayServe, stack: Stack) -> str:
    """One replica, of one of the engines; Ray lets it have one request at a time."""
    router = {"url": stack.picker.url, "tell": "told", "fall_back": True}
    ray_serve.deploy("narrow", [stack.engines[:1]], 1, stats=True, **router)
    return "narrow"


def body(max_tokens: int = 5, **fields: Any) -> dict[str, Any]:
    asked = {"model": "emulated", "prompt": [1, 2, 3], "max_tokens": max_tokens}
    return {**asked, "ignore_eos": True, **fields}


def cancelled(asked: Asked) -> None:
    with pytest.raises(RayCallError, match="Cancelled"):
        asked.result()


def test_no_engine_or_rank_gets_more_than_its_slots(
    ray_serve: RayServe, stack: Stack, wide: str
) -> None:
    before, full = stack.told(), SLOTS * WORKERS
    # Until all have been asked none ends: where calls take long to be made, few would run at once.
    stack.fleet.slow_down(300)
    asked = [ray_serve.ask(wide, body(20)) for _ in range(6 * full)]
    wait_until(lambda: stack.fleet.unfinished() == full, WAIT_S, "every slot is taken")
    wait_until(lambda: stack.pool() == len(asked) - full, WAIT_S, "all others wait")
    stack.fleet.restore()

    answers = [each.result() for each in asked]

    most: dict[str, int] = {}
    for answer in answers:
        assert answer["text"]
        most |= {at: max(most.get(at, 0), n) for at, n in answer["most"].items()}
    first, second, ranks = stack.engines
    assert most == dict.fromkeys((first, second, f"{ranks}/0", f"{ranks}/1"), SLOTS)
    stack.idle()
    assert stack.told() == before + len(asked)


def test_what_has_no_slot_waits_in_the_pool_until_an_end_is_told(
    ray_serve: RayServe, stack: Stack, wide: str
) -> None:
    running = [ray_serve.ask(wide, body(ENDLESS)) for _ in range(SLOTS * WORKERS)]
    full = SLOTS * WORKERS
    wait_until(lambda: stack.fleet.unfinished() == full, WAIT_S, "every slot is taken")
    waiting, given_up = (ray_serve.ask(wide, body()) for _ in range(2))
    wait_until(lambda: stack.pool() == 2, WAIT_S, "two wait in the pool")
    assert stack.in_flight() == [SLOTS] * WORKERS

    ray_serve.cancel(given_up)
    wait_until(lambda: stack.pool() == 1, WAIT_S, "one has left")
    ray_serve.cancel(running[0])

    assert waiting.result()["text"]
    for each in running[1:]:
        ray_serve.cancel(each)
    for each in (*running, given_up):
        cancelled(each)
    stack.idle()
    assert stack.counted("evenstep_requests_total", 'outcome="aborted"') >= full + 1


@pytest.mark.parametrize(
    ("fields", "status", "text"),
    [({"model": "other"}, 404, "other"), ({"model": 5}, 400, "should be a string")],
    ids=["unknown model", "malformed"],
)
def test_what_the_picker_refuses_fails_with_its_words(
    ray_serve: RayServe, stack: Stack, wide: str, fields: dict[str, Any], status: int, text: str
) -> None:
    with pytest.raises(RayCallError, match=text) as failed:
        ray_serve.ask(wide, body(**fields)).result()
    assert (failed.value.kind, failed.value.status) == ("RefusedError", status)
    stack.idle()


def test_a_stream_has_its_slot_until_its_end(ray_serve: RayServe, stack: Stack, wide: str) -> None:
    before, full = stack.told(), SLOTS * WORKERS
    streams = [ray_serve.ask(wide, body(ENDLESS), "events") for _ in range(full)]
    wait_until(lambda: stack.fleet.unfinished() == full, WAIT_S, "every slot is taken")
    short = ray_serve.ask(wide, body(3), "events")
    wait_until(lambda: stack.pool() == 1, WAIT_S, "another stream waits")
    assert stack.told() == before

    for each in streams:
        ray_serve.cancel(each)

    assert short.result()[-2] == "data: [DONE]\n"
    for each in streams:
        cancelled(each)
    stack.idle()


def test_other_calls_are_left_to_ray(ray_serve: RayServe, stack: Stack, wide: str) -> None:
    before = stack.told()
    assert ray_serve.ask(wide, None, "pid").result() > 0
    assert stack.told() == before


def test_a_request_is_picked_again_until_a_replica_takes_it(
    ray_serve: RayServe, stack: Stack, narrow: str
) -> None:
    long = ray_serve.ask(narrow, body(ENDLESS))
    wait_until(lambda: stack.fleet.unfinished() == 1, WAIT_S, "it runs")
    before = stack.told()
    others = [ray_serve.ask(narrow, body()) for _ in range(4)]
    wait_until(lambda: stack.told() > before + 8, WAIT_S, "Ray refuses the others")
    assert stack.fleet.unfinished() == 1

    ray_serve.cancel(long)

    only = {stack.engines[0]: 1}
    assert [each.result()["most"] for each in others] == [only] * len(others)
    cancelled(long)
    stack.idle()


def test_that_a_replica_dies_is_told(ray_serve: RayServe, stack: Stack, narrow: str) -> None:
    pid = ray_serve.ask(narrow, None, "pid").result()
    asked = ray_serve.ask(narrow, body(ENDLESS))
    wait_until(lambda: stack.fleet.unfinished() == 1, WAIT_S, "it runs")

    os.kill(pid, signal.SIGKILL)

    with pytest.raises(RayCallError, match="ActorDied"):
        asked.result()
    stack.idle()
    assert stack.counted("evenstep_requests_total", 'outcome="failed"') == 1
    assert ray_serve.ask(narrow, body()).result()["text"], "by another that Ray has started"


def test_without_a_picker(ray_serve: RayServe, stack: Stack, wide: str, narrow: str) -> None:
    """The last one: it ends the picker."""
    stack.picker.kill()

    with pytest.raises(RayCallError, match="cannot be reached") as failed:
        ray_serve.ask(wide, body()).result()
    assert (failed.value.status, failed.value.retry_after_s) == (503, 1.0)
    fallen_back = ray_serve.ask(narrow, body()).result()
    assert (fallen_back["told"], bool(fallen_back["text"])) == (None, True)
