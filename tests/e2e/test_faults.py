"""Workers that die and clients that leave, before an emulated fleet and a real router process."""

import asyncio
import json
import random
from pathlib import Path

import pytest

from router.core.errors import UpstreamError
from router.engines.http_client import HttpClient
from tests.support.chaos import (
    SLOTS,
    WORKERS,
    Seen,
    ask,
    assert_idle,
    body,
    cluster,
    generated_tokens,
    live,
    sent_to_first,
    workers_of,
)
from tests.support.engine import metric
from tests.support.server import wait_until

# No answer of a hundred tokens ends before the test goes on, however busy the machine is.
SLOWER = 30.0


@pytest.mark.parametrize("mid_event", [False, True])
async def test_worker_killed_mid_stream(tmp_path: Path, mid_event: bool) -> None:
    started, waiting = WORKERS * SLOTS, 6
    with cluster(tmp_path, "--time-scale", "4") as (fleet, router):
        client = HttpClient()
        seen = [Seen() for _ in range(started + waiting)]
        async with asyncio.timeout(120):
            await asyncio.to_thread(fleet.slow_down, SLOWER)
            first = [asyncio.create_task(ask(client, router, s, body(120))) for s in seen[:started]]
            await asyncio.gather(*(one.first.wait() for one in seen[:started]))
            rest = [asyncio.create_task(ask(client, router, s, body(20))) for s in seen[started:]]
            await asyncio.to_thread(fleet.fault, 0, "kill", mid_event=mid_event)
            await asyncio.to_thread(fleet.restore, *range(1, WORKERS))
            await asyncio.gather(*first, *rest)

        broken = [one for one in seen if not one.complete]
        assert len(broken) == SLOTS
        for one in broken:
            assert one in seen[:started]
            assert one.errors == 1
            assert one.events[-1]["error"]["code"] == 502
        await asyncio.to_thread(wait_until, lambda: live(router) == [1, 2], 60, "it is down")

        fleet.restore(0)
        await asyncio.to_thread(wait_until, lambda: live(router) == [0, 1, 2], 60, "it is up")
        async with asyncio.timeout(60):
            while not generated_tokens(fleet, 0):
                again = await asyncio.gather(
                    *(ask(client, router, Seen(), body(20)) for _ in range(started))
                )
                assert all(one.complete for one in again)
        await asyncio.to_thread(assert_idle, fleet, router)
        await client.aclose()


async def test_requests_not_yet_started_go_to_others(tmp_path: Path) -> None:
    """Steps stop, so that requests sit on the worker without a first byte; then it dies."""
    with cluster(tmp_path, "--no-barrier", "--time-scale", "4") as (fleet, router):
        client = HttpClient()
        await asyncio.to_thread(fleet.fault, 0, "hang")
        seen = [Seen() for _ in range(WORKERS * SLOTS)]
        async with asyncio.timeout(60):
            asked = [asyncio.create_task(ask(client, router, one, body(30))) for one in seen]
            await asyncio.to_thread(wait_until, lambda: sent_to_first(router) > 0, 30, "some sent")
            await asyncio.to_thread(fleet.fault, 0, "kill")
            await asyncio.gather(*asked)
        assert all(one.complete for one in seen)
        await asyncio.to_thread(wait_until, lambda: live(router) == [1, 2], 60, "it is down")
        await client.aclose()


async def test_a_worker_that_falls_silent_gives_back_what_it_has_not_started(
    tmp_path: Path,
) -> None:
    impatient = ("--health-interval", "0.2", "--health-timeout", "0.3")
    with cluster(tmp_path, "--no-barrier", router_flags=impatient) as (fleet, router):
        client = HttpClient()
        async with asyncio.timeout(200):
            # The router may see that it is silent before it has sent anything there.
            while metric(router, "evenstep_requests_returned_total") == 0:
                await asyncio.to_thread(fleet.restore, 0)
                await asyncio.to_thread(
                    wait_until, lambda: live(router) == [0, 1, 2], 60, "all are up"
                )
                await asyncio.to_thread(fleet.fault, 0, "hang")
                seen = [Seen() for _ in range(WORKERS * SLOTS)]
                requests = [body(30, stream=number % 2 == 0) for number in range(len(seen))]
                answers = zip(seen, requests, strict=True)
                await asyncio.gather(*(ask(client, router, *one) for one in answers))
                assert [one.status for one in seen] == [200] * len(seen)
                assert all(one.complete for one in seen[::2])
        await asyncio.to_thread(wait_until, lambda: live(router) == [1, 2], 60, "it is down")
        await asyncio.to_thread(wait_until, lambda: sent_to_first(router) == 0, 60, "all are back")
        await client.aclose()


@pytest.mark.parametrize(
    ("of_fleet", "of_router"), [((), ("--lockstep", "default")), (("--lockstep",), ())]
)
async def test_a_lockstep_group_goes_down_and_comes_back_as_a_whole(
    tmp_path: Path, of_fleet: tuple[str, ...], of_router: tuple[str, ...]
) -> None:
    """It is set, as the emulated fleet would go on without the dead worker; or its ranks tell."""
    flags = "--time-scale", "4", *of_fleet
    with cluster(tmp_path, *flags, router_flags=of_router) as (fleet, router):
        client = HttpClient()
        seen = [Seen() for _ in range(WORKERS * SLOTS + 2)]
        async with asyncio.timeout(60):
            started = [asyncio.create_task(ask(client, router, s, body(900))) for s in seen[:-2]]
            await asyncio.gather(*(one.first.wait() for one in seen[:-2]))
            rest = [asyncio.create_task(ask(client, router, s, body(20))) for s in seen[-2:]]
            await asyncio.to_thread(fleet.fault, 0, "kill")
            await asyncio.gather(*started, *rest)
        assert [one.errors for one in seen[:-2]] == [1] * (WORKERS * SLOTS)
        assert [one.status for one in seen[-2:]] == [503, 503]
        await asyncio.to_thread(wait_until, lambda: live(router) == [], 60, "the group is down")
        reasons = [worker["down_reason"] for worker in workers_of(router)]
        assert all("in lockstep with" in reason for reason in reasons[1:]), reasons

        fleet.restore(0)
        wait_until(lambda: live(router) == [0, 1, 2], 60, "the group is used again")
        async with asyncio.timeout(60):
            again = await asyncio.gather(
                *(ask(client, router, Seen(), body(20)) for _ in range(WORKERS * SLOTS))
            )
        assert all(one.complete for one in again)
        await asyncio.to_thread(assert_idle, fleet, router)
        await client.aclose()


async def test_no_worker_left(tmp_path: Path) -> None:
    with cluster(tmp_path, "--time-scale", "4", workers=1) as (fleet, router):
        client = HttpClient()
        seen = [Seen() for _ in range(SLOTS + 2)]
        async with asyncio.timeout(120):
            await asyncio.to_thread(fleet.slow_down, SLOWER)
            asked = [asyncio.create_task(ask(client, router, s, body(200))) for s in seen[:SLOTS]]
            await asyncio.gather(*(one.first.wait() for one in seen[:SLOTS]))
            asked += [asyncio.create_task(ask(client, router, s, body(200))) for s in seen[SLOTS:]]
            await asyncio.to_thread(fleet.fault, 0, "kill")
            await asyncio.gather(*asked)
        assert [one.errors for one in seen[:SLOTS]] == [1] * SLOTS
        assert [one.status for one in seen[SLOTS:]] == [503, 503]
        refused = await ask(client, router, Seen(), body(1))
        assert refused.status == 503
        assert json.loads(refused.body)["error"]["type"] == "ServiceUnavailableError"
        assert router.get("/health").status_code == 503
        await client.aclose()


@pytest.mark.slow
async def test_thousand_requests_with_aborts(tmp_path: Path) -> None:
    """Every tenth client leaves: while it waits, before its first byte, or in mid-answer."""
    rng = random.Random(1)
    with cluster(tmp_path) as (fleet, router):
        client = HttpClient()
        room = asyncio.Semaphore(40)
        aborted = completed = 0

        async def one(number: int) -> None:
            nonlocal aborted, completed
            leaves_after_s = rng.uniform(0, 0.15) if number % 10 == 0 else None
            request = body(rng.randint(20, 40), stream=number % 4 != 0)
            async with room:
                seen = Seen()
                try:
                    async with asyncio.timeout(leaves_after_s):
                        await ask(client, router, seen, request)
                except TimeoutError:
                    aborted += 1
                except UpstreamError as error:
                    raise AssertionError(f"request {number}: {error}") from error
                else:
                    assert seen.status == 200
                    completed += 1

        async with asyncio.timeout(100):
            await asyncio.gather(*(one(number) for number in range(1000)))
        assert aborted + completed == 1000
        assert aborted > 50
        await asyncio.to_thread(assert_idle, fleet, router)
        await client.aclose()
