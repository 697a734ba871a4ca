"""The router before two real vLLM engines that have other names for some of what is read."""

import contextlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.chaos import workers_of
from tests.support.engine import MODEL, READY_S, Installation, metric, starting_engine
from tests.support.engine_python import ROOT
from tests.support.server import free_port, running_router, wait_ready, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

LACKING = {
    "LacksSome": (
        *("watermark (Scheduler.kv_cache_manager.watermark_blocks)", "power (Scheduler.vllm_conf"),
        "preemptions (SchedulerOutput.preempted_req_ids)",
    ),
    "LacksState": ("state (Scheduler.running)",),
}


def test_they_serve_and_the_router_names_what_they_lack(
    engine_installation: Installation, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        engines, specs = [], []
        for name in LACKING:
            endpoint = f"tcp://127.0.0.1:{free_port(2)}"
            config = json.dumps({"evenstep": {"snapshots": endpoint}})
            flags = "--scheduler-cls", f"tests.support.renamed_vllm.{name}", "--max-num-seqs", "8"
            folder = tmp_path / name
            folder.mkdir()
            engine = stack.enter_context(
                starting_engine(
                    engine_installation,
                    folder,
                    *(*flags, "--additional-config", config),
                    environment={"PYTHONPATH": str(ROOT)},
                )
            )
            engines.append((engine, folder))
            specs += ["--worker", f"{engine.url},snapshots={endpoint}"]
        for engine, _ in engines:
            wait_ready(engine, READY_S)
        router = stack.enter_context(running_router(tmp_path, *specs, "--metrics-interval", "0.1"))

        def told() -> bool:
            sources = [worker["state_source"] for worker in workers_of(router)]
            return sources == ["snapshots", "metrics"]

        wait_until(told, 60, "the router has its sources")
        some, state = workers_of(router)
        assert some["unreported"] == ["watermark", "power", "preemptions"]
        assert (some["snapshots_problem"], some["slots_reported"]) == (None, 8)
        assert state["unreported"] == ["state", "prompt_budget", "prefix_cache"]
        said = "plug-in cannot read state, prompt_budget, prefix_cache of this vLLM"
        assert said in state["snapshots_problem"]

        def complete(_: int) -> Any:
            asked = {"model": MODEL, "prompt": [9] * 20, "max_tokens": 30, "ignore_eos": True}
            return httpx.post(f"{router.url}/v1/completions", json=asked, timeout=60).json()

        with ThreadPoolExecutor(16) as pool:
            tokens = [one["usage"]["completion_tokens"] for one in pool.map(complete, range(32))]
        assert tokens == [30] * 32
        for (engine, folder), lines in zip(engines, LACKING.values(), strict=True):
            (log,) = folder.glob("engine-*.log")
            notes = [
                line for line in log.read_text().splitlines() if "the plug-in cannot read" in line
            ]
            assert len(notes) == 1
            assert all(line in notes[0] for line in lines)
            assert metric(engine, "vllm:request_success_total") > 0
