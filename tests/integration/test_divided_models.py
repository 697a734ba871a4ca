"""One model in lines that have no common queue: prefill and decode workers, and others."""

import asyncio
from contextlib import ExitStack
from pathlib import Path

import httpx

from tests.integration.test_shared_models import TIMEOUT_S, ask, assigned, up
from tests.support.fleet import running_fleet
from tests.support.scripted import scripted, soon
from tests.support.server import running_router, wait_until
from tests.support.serving import serving
from tests.support.splitting import ANSWER, computed


async def test_each_request_enters_the_pair_with_the_fewest() -> None:
    async with (
        scripted(4) as engines,
        serving(engines, prefills=2, kept_s=30.0, groups="xyxy") as router,
    ):
        asked = [router.post(n=1), router.post(n=1)]
        for prefill, decode in zip(engines[:2], engines[2:], strict=True):
            await computed(await prefill.next())
            await (await decode.next()).answer(ANSWER)
        assert [(await soon(each)).status_code for each in asked] == [200, 200]

        router.down("c")
        alone = [router.post(n=1), router.post(n=1)]
        for _ in alone:
            await computed(await engines[1].next())
            await (await engines[3].next()).answer(ANSWER)
        assert [(await soon(each)).status_code for each in alone] == [200, 200]
        beside = asyncio.create_task(router.http.post("/v1/embeddings", json={"model": "tiny"}))
        await (await engines[3].next()).answer(ANSWER)
        assert (await soon(beside)).status_code == 200


async def test_a_pair_and_a_worker_that_does_all_share_the_requests() -> None:
    async with (
        scripted(3) as (prefill, decode, whole),
        serving([prefill, decode, whole], prefills=1, kept_s=30.0, groups="xxz") as router,
    ):
        asked = [router.post(n=1), router.post(n=1)]
        await (await whole.next()).answer(ANSWER)
        await computed(await prefill.next())
        await (await decode.next()).answer(ANSWER)
        assert [(await soon(each)).status_code for each in asked] == [200, 200]


def test_pairs_share_a_model_over_real_sockets_too(tmp_path: Path) -> None:
    flags = ("--workers", "1", "--prefill-workers", "1", "--slots", "4")
    with ExitStack() as stack:
        fleets = {name: stack.enter_context(running_fleet(tmp_path, *flags)) for name in "ab"}
        workers = [
            flag
            for name, fleet in fleets.items()
            for spec in fleet.workers
            for flag in ("--worker", spec.replace("group=default", f"group={name}"))
        ]
        router = stack.enter_context(running_router(tmp_path, *workers))
        wait_until(lambda: up(router) == 4, 60.0, "all workers are up")

        async def load() -> list[int]:
            async with httpx.AsyncClient(base_url=router.url, timeout=TIMEOUT_S) as http:
                codes = await asyncio.gather(*(ask(http, 20) for _ in range(12)))
                await asyncio.to_thread(fleets["a"].fault, 0, "kill")
                await asyncio.to_thread(wait_until, lambda: up(router) == 3, 60.0, "one is down")
                return [*codes, *await asyncio.gather(*(ask(http, 4) for _ in range(8)))]

        codes = asyncio.run(load())
        assert codes.count(200) == len(codes) == 20
        counts = assigned(router)
        assert counts["a"] + counts["b"] == 20
        assert min(counts["a"], counts["b"]) >= 3
