"""Picks by HTTP alone: what Ray's proxies ask, and what ext_authz cannot do."""

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.envoy.config import manager_of
from router.config.setting_sources import load_settings
from router.core.errors import ConfigError
from router.core.types import Outcome, WorkerSpec
from router.http.port import DataPlane
from router.serve.router import Router
from tests.support.gateway import gateway, settled
from tests.support.scripted import scripted, soon, until
from tests.support.serving import Router as Served
from tests.support.serving import serving


async def route(router: Served, **fields: object) -> httpx.Response:
    body = {"model": "tiny", "prompt": [1, 2, 3], **fields}
    return await router.http.post("/internal/route", json=body)


async def test_ray_is_told_host_and_port_and_tells_the_end() -> None:
    async with (
        scripted() as (engine,),
        serving([engine], slots=1, plane=DataPlane.SPLICE) as router,
    ):
        told = (await route(router, messages=[])).json()
        assert (told["host"], told["port"], told["replica_id"]) == ("127.0.0.1", engine.port, "a")
        assert told["data_parallel_rank"] is None
        assert router.in_flight == 1

        ended = await router.http.post(
            "/internal/route/end", json={"request_id": told["request_id"]}
        )

        assert ended.status_code == 204
        await router.settled()
        wrong = await router.http.post("/internal/route/end", json={})
        assert wrong.status_code == 400


async def test_what_no_log_shows_is_over_soon(tmp_path: Path) -> None:
    def change(config: Any) -> None:
        manager_of(config)["access_log_options"] = {"access_log_flush_interval": "0.02s"}

    async with scripted() as engines, gateway(tmp_path, engines, change=change) as gate:
        running = gate.router.post()
        exchange = await engines[0].next()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gate.router.port}") as http:
            body = {"model": "tiny", "prompt": [1]}
            told = await http.post("/pick/v1/completions", json=body)  # and nobody sends it
        held = told.headers["x-request-id"]
        running_id = exchange.headers["x-request-id"]
        await until(lambda: bool((pick := gate.picks.known(running_id)) and pick.logged))

        for _ in range(4):
            gate.picks.look(time.monotonic() + 20)

        assert gate.ends == {"unheard": 1}
        assert gate.picks.known(held) is None
        await exchange.answer(b"{}")
        assert (await soon(running)).status_code == 200
        await settled(gate)
        assert gate.ends == {"unheard": 1, "log": 1}
        assert gate.router.outcomes == {Outcome.ABORTED: 1, Outcome.COMPLETED: 1}


async def test_a_log_that_breaks_off_tells_no_more(tmp_path: Path) -> None:
    async with scripted() as engines, gateway(tmp_path, engines) as gate:
        asked = gate.router.post()
        await (await engines[0].next()).answer(b"{}")
        assert (await soon(asked)).status_code == 200
        await until(lambda: gate.picks.logs == 1)
        picks = gate.picks
    await until(lambda: picks.logs == 0)


def test_workers_of_no_address_do_not_join() -> None:
    settings = load_settings({"grpc_port": "9002"})
    router = Router(settings, lambda: settings)
    for url in ("http://engine:8000", "http://localhost:8000"):
        with pytest.raises(ConfigError, match="an IP address and a port"):
            router.fleet.add(WorkerSpec("a", url))
    assert not router.fleet.members
    router.fleet.add(WorkerSpec("a", "http://10.0.0.7:8000"))
    assert [member.spec.id for member in router.fleet.members] == ["a"]


async def test_a_model_is_not_renamed_without_its_body() -> None:
    async with (
        scripted() as (engine,),
        serving([engine], aliases={"small": "tiny"}, plane=DataPlane.SPLICE) as router,
    ):
        for path in ("/pick/v1/completions", "/internal/route"):
            refused = await soon(router.post(path, model="small"))
            assert refused.status_code == 400
            assert "by its own name" in refused.json()["error"]["message"]
        await router.settled()


async def test_a_forced_removal_of_its_worker_ends_it() -> None:
    async with scripted() as (engine,), serving([engine], plane=DataPlane.SPLICE) as router:
        assert (await soon(router.post("/pick/v1/completions"))).status_code == 200
        assert router.in_flight == 1

        router.attempts.break_off("a", "removed")

        await until(lambda: not router.picks.counts.open)
        await router.settled()
