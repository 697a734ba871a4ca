"""A plan's router configuration starts, before engines where the plan says that they are."""

import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.support.fleet import running_fleet
from tests.support.server import free_port, running_router

Run = Callable[..., tuple[int, str, str]]

_SERVERS = """
[model]
name = "emulated"
blocks = 70
block_gb = 1.32
kv_bytes_per_token = 57344
flops_per_token = 5e9

[workload]
input_tokens = 2000
output_tokens = 20

[engine]
port = {port}
load = 0.01

[[servers]]
name = "h100"
gpu = "H100-SXM"
count = 2

[[servers]]
name = "a100"
gpu = "A100-80GB-SXM"
count = 2
"""


def test_a_two_stage_plan_routes(evenstep: Run, tmp_path: Path) -> None:
    with running_fleet(tmp_path, "--workers", "2", "--no-barrier") as fleet:
        file = tmp_path / "servers.toml"
        file.write_text(_SERVERS.format(port=fleet.server.port))
        out = tmp_path / "out"
        code, _, error = evenstep("plan", "--config", str(file), "--rate", "1", "--out", str(out))
        assert code == 0, error
        plan = json.loads((out / "plan.json").read_text())
        assert [len(chain["servers"]) for chain in plan["chains"]] == [2, 2]

        admin = free_port()
        config = ("--config", str(out / "router.toml"), "--admin-port", str(admin))
        with running_router(tmp_path, *config) as router:
            body = {"model": "emulated", "prompt": "hello", "max_tokens": 4}
            url = f"{router.url}/v1/completions"
            answers = [httpx.post(url, json=body, timeout=60) for _ in range(3)]
            assert [answer.status_code for answer in answers] == [200] * 3
            told = httpx.get(f"http://127.0.0.1:{admin}/workers", timeout=60)
            shown = told.json()["workers"]

    for chain, worker in zip(plan["chains"], shown, strict=True):
        assert (worker["id"], worker["url"]) == (chain["worker"], chain["url"])
        assert worker["slots"] == chain["slots"]
        assert worker["service_rate"] == pytest.approx(chain["service_rate"], rel=1e-5)
