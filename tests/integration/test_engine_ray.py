"""Ray Serve before a real vLLM, with the request router that asks the picker."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.chaos import workers_of
from tests.support.engine import MODEL, metric, requests_running
from tests.support.ray_serve import RayCallError, RayServe, running_ray
from tests.support.server import Server, free_port, running_router, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

SLOTS = 4  # the engine itself would take eight
WAIT_S = 60.0


@pytest.fixture
def ray_serve(tmp_path: Path) -> Iterator[RayServe]:
    with running_ray(tmp_path / "log") as started:
        yield started


def body(max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "even steps", "max_tokens": max_tokens, **fields}


def test_a_real_engine_gets_no_more_than_its_slots(
    engine: Server, ray_serve: RayServe, tmp_path: Path
) -> None:
    worker = f"{engine.url},slots={SLOTS}"
    flags = ("--grpc-port", str(free_port()), "--worker", worker)
    with running_router(tmp_path, *flags, name="pick") as picker:
        wait_until(lambda: workers_of(picker)[0]["up"], WAIT_S, "the engine is up")
        there = engine.url.removeprefix("http://")
        ray_serve.deploy("vllm", [[there]], url=picker.url, tell="told")
        long = [ray_serve.ask("vllm", body(30_000, ignore_eos=True)) for _ in range(SLOTS)]
        wait_until(lambda: requests_running(engine) == SLOTS, WAIT_S, "all slots are taken")
        held = [ray_serve.ask("vllm", body(3, ignore_eos=True)) for _ in range(SLOTS)]
        wait_until(lambda: pool(picker) == SLOTS, WAIT_S, "the others wait in the pool")
        assert metric(engine, "vllm:num_requests_waiting") == 0

        for each in long:
            ray_serve.cancel(each)

        answers = [each.result() for each in held]
        assert [each["tokens"] for each in answers] == [3] * SLOTS  # the text of three may be empty
        assert max(each["most"][there] for each in answers) == SLOTS
        for each in long:
            with pytest.raises(RayCallError, match="Cancelled"):
                each.result()
        with pytest.raises(RayCallError, match="no-such-model"):
            ray_serve.ask("vllm", body(3, model="no-such-model")).result()
        wait_until(lambda: workers_of(picker)[0]["in_flight"] == 0, WAIT_S, "all ends are told")


def pool(picker: Server) -> int:
    (group,) = picker.get("/health").json()["groups"].values()
    return int(group["pool_requests"])
