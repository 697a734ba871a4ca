"""The router before two real vLLM engines, each with one place for LoRA adapters."""

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.chaos import workers_of
from tests.support.engine import MODEL, READY_S, Installation, metric, starting_engine
from tests.support.engine_python import ROOT
from tests.support.lora import RANK, write_adapter
from tests.support.server import Server, free_port, running_router, wait_ready, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

SLOTS = 8
WAIT_S = 120.0


@contextlib.contextmanager
def adapted(where: Installation, folder: Path) -> Iterator[tuple[Server, list[Server]]]:
    """A router, and its engines; both serve the adapters x, y and z."""
    modules = [f"{name}={write_adapter(where.model, folder / name)}" for name in "xyz"]
    with contextlib.ExitStack() as stack:
        engines, specs = [], []
        for _ in range(2):
            endpoint = f"tcp://127.0.0.1:{free_port(2)}"
            flags = (
                *("--scheduler-cls", "engine_patches.scheduler.EvenstepScheduler"),
                *("--additional-config", json.dumps({"evenstep": {"snapshots": endpoint}})),
                *("--enable-lora", "--max-loras", "1", "--max-lora-rank", str(RANK)),
                *("--lora-modules", *modules, "--max-num-seqs", str(SLOTS)),
            )
            paths = {"PYTHONPATH": str(ROOT)}
            engine = starting_engine(where, folder, *flags, environment=paths)
            engines.append(stack.enter_context(engine))
            specs += ["--worker", f"{engines[-1].url},snapshots={endpoint}"]
        for server in engines:
            wait_ready(server, READY_S)
        # Nobody is late.
        router = stack.enter_context(running_router(folder, *specs, "--starvation", "600"))

        def told() -> bool:
            found = [(one["state_source"], one["max_loras"]) for one in workers_of(router)]
            return found == [("snapshots", 1)] * 2

        wait_until(told, WAIT_S, "the router has its sources")
        yield router, engines


def test_a_request_waits_in_the_pool_until_its_adapter_has_a_place(
    engine_installation: Installation, tmp_path: Path
) -> None:
    with (
        adapted(engine_installation, tmp_path) as (router, engines),
        httpx.Client(base_url=router.url, timeout=WAIT_S) as http,
        contextlib.ExitStack() as others,
    ):

        def asked(model: str, tokens: int) -> dict[str, Any]:
            fields = {"model": model, "prompt": [5] * 20, "max_tokens": tokens, "ignore_eos": True}
            return {"url": "/v1/completions", "json": {**fields, "stream": tokens > 100}}

        def begin(model: str) -> contextlib.ExitStack:
            """Until it is closed; it has begun."""
            stack = contextlib.ExitStack()
            answer = stack.enter_context(http.stream("POST", **asked(model, 30_000)))
            lines: Any = answer.iter_lines()
            stack.callback(lines.close)  # which it is as soon as nobody refers to it
            assert "choices" in next(lines)
            return stack

        def counts(name: str) -> list[float]:
            return [metric(engine, f"vllm:num_requests_{name}") for engine in engines]

        x = [begin("x")]
        wait_until(lambda: sum(counts("running")) == 1, WAIT_S, "x runs")
        with_x = counts("running").index(1)
        others.enter_context(begin("y"))
        wait_until(lambda: counts("running") == [1, 1], WAIT_S, "y runs elsewhere")
        # The other worker has less to do, but no place.
        x += [begin("x") for _ in range(3)]
        wait_until(lambda: counts("running")[with_x] == 4, WAIT_S, "all of x run together")
        assert http.post(**asked(MODEL, 8)).json()["usage"]["completion_tokens"] == 8

        waiting = http.build_request("POST", **asked("z", 9))
        with ThreadPoolExecutor(1) as pool:
            z = pool.submit(http.send, waiting)
            wait_until(lambda: metric(router, "evenstep_pool_requests") == 1, WAIT_S, "z waits")
            for stack in x[:3]:
                stack.close()
            wait_until(lambda: counts("running") == [1, 1], WAIT_S, "three have left")
            assert http.post(**asked(MODEL, 8)).status_code == 200
            assert metric(router, "evenstep_pool_requests") == 1
            assert counts("waiting") == [0, 0]
            assert not z.done()
            x[3].close()
            assert z.result(WAIT_S).json()["usage"]["completion_tokens"] == 9
