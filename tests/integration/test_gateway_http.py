"""Picks by HTTP alone: what Ray's proxies ask, and what ext_authz cannot do."""

import httpx

from router.http.port import DataPlane
from tests.support.scripted import scripted, soon, until
from tests.support.serving import Router, serving


async def route(router: Router, **fields: object) -> httpx.Response:
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


async def test_a_model_is_not_renamed_without_its_body() -> None:
    async with (
        scripted() as (engine,),
        serving([engine], aliases={"small": "tiny"}, plane=DataPlane.SPLICE) as router,
    ):
        refused = await soon(router.post("/pick/v1/completions", model="small"))
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
