"""A process of several is killed in the midst of streams: each ends once, and the others go on."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx

from router.core.errors import UpstreamError
from router.engines.http_client import HttpClient
from router.processes.remote_dispatcher import GONE_S
from tests.support.chaos import Seen, ask, body, workers_of
from tests.support.fleet import Fleet, running_fleet, worker_flags
from tests.support.processes import DECIDER, PROXY, kill, outcomes, pids, samples, wait_all_up
from tests.support.server import Server, running_router, wait_until

STREAMS, TOKENS = 24, 150
COMPLETIONS = "/v1/completions"
WORKERS = 2


@contextlib.contextmanager
def several(folder: Path, *flags: str) -> Iterator[tuple[Fleet, Server]]:
    rates = ("--slots", "40", "--step-time", "0.02,0")
    with running_fleet(folder, "--workers", str(WORKERS), *rates) as fleet:
        told = ("--processes", "2", "--policy", "least_tokens", *flags, *worker_flags(fleet))
        with running_router(folder, *told) as router:
            wait_all_up(router)
            yield fleet, router


@contextlib.asynccontextmanager
async def streaming(fleet: Fleet, router: Server) -> AsyncIterator[list[asyncio.Task[Seen]]]:
    """Streams that have begun, each on a connection of its own, and so at either proxy.

    They are slow, so that a process is back before they have ended, until ``completed``.
    """
    for rank in range(WORKERS):
        await asyncio.to_thread(fleet.fault, rank, "slow", factor=25)
    clients = [HttpClient() for _ in range(STREAMS)]
    seen = [Seen() for _ in clients]
    tasks = [
        asyncio.create_task(ask(client, router, one, body(TOKENS)))
        for client, one in zip(clients, seen, strict=True)
    ]
    async with asyncio.timeout(150):
        await asyncio.gather(*(one.first.wait() for one in seen))
        yield tasks
    for client in clients:
        await client.aclose()


def in_flight(router: Server) -> int:
    try:
        return int(sum(worker["in_flight"] for worker in workers_of(router)))
    except (OSError, httpx.HTTPError, KeyError):
        return -1


async def until(condition: Callable[[], bool], what: str) -> None:
    await asyncio.to_thread(wait_until, condition, 60, what)


async def completed(fleet: Fleet, tasks: list[asyncio.Task[Seen]]) -> int:
    """Let streams go on fast; how many came to their ends, the others broke off."""
    for rank in range(WORKERS):
        await asyncio.to_thread(fleet.restore, rank)
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(one, Seen | UpstreamError) for one in ended), ended
    whole = [one for one in ended if isinstance(one, Seen)]
    assert all(one.complete for one in whole)
    return len(whole)


async def served(router: Server) -> int:
    """Some requests on connections of their own; whether all were answered."""
    answers = []
    for _ in range(4):
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            url = router.url + COMPLETIONS
            answers.append((await client.post(url, content=body(2, stream=False))).status_code)
    assert answers == [200] * len(answers)
    return len(answers)


async def test_a_proxy(tmp_path: Path) -> None:
    with several(tmp_path) as (fleet, router):
        async with streaming(fleet, router) as streams:
            kill(pids(router, PROXY)[0])
            whole = await completed(fleet, streams)
        assert 0 < whole < STREAMS
        await until(lambda: not fleet.unfinished() and not in_flight(router), "all has ended")
        assert outcomes(router) == {"completed": whole, "aborted": STREAMS - whole}

        await asyncio.to_thread(wait_all_up, router)
        more = await served(router)
        assert outcomes(router) == {"completed": whole + more, "aborted": STREAMS - whole}
        restarts = samples(router, "evenstep_process_restarts_total")
        assert restarts == {'role="proxy"': 1, 'role="decider"': 0}


async def test_the_deciding_process(tmp_path: Path) -> None:
    with several(tmp_path) as (fleet, router):
        async with streaming(fleet, router) as streams:
            kill(pids(router, DECIDER)[0])
            await until(lambda: in_flight(router) == STREAMS, "it knows what is under way")
            assert not any(stream.done() for stream in streams)
            more = await served(router)
            assert await completed(fleet, streams) == STREAMS
        await until(lambda: not fleet.unfinished() and not in_flight(router), "all has ended")
        assert outcomes(router) == {"completed": STREAMS + more}
        assert samples(router, "evenstep_processes") == {'role="proxy"': 2, 'role="decider"': 1}
        restarts = samples(router, "evenstep_process_restarts_total")
        assert restarts == {'role="proxy"': 0, 'role="decider"': 1}


async def test_what_the_deciding_process_serves_itself(tmp_path: Path) -> None:
    """Its own streams end with it, and say so once."""
    with several(tmp_path) as (fleet, router):
        client, meter = HttpClient(), [(b"x-evenstep-energy", b"1")]
        stream, seen = body(TOKENS), Seen()
        async with asyncio.timeout(120):
            for rank in range(WORKERS):
                await asyncio.to_thread(fleet.fault, rank, "slow", factor=25)
            response = await client.request("POST", router.url, COMPLETIONS, meter, stream)
            kill(pids(router, DECIDER)[0])
            seen.status, seen.body = response.status, await response.read()
            assert (seen.status, seen.errors) == (200, 1)
            await asyncio.to_thread(wait_all_up, router)
        for rank in range(WORKERS):
            await asyncio.to_thread(fleet.restore, rank)
        await until(lambda: not fleet.unfinished() and not in_flight(router), "all has ended")
        assert outcomes(router) == {}
        await client.aclose()


async def test_who_asks_while_nobody_decides_waits_for_a_while(tmp_path: Path) -> None:
    with several(tmp_path) as (_, router):
        async with asyncio.timeout(120), httpx.AsyncClient(timeout=60, trust_env=False) as client:
            url = router.url + COMPLETIONS
            kill(pids(router, DECIDER)[0])
            answer = await client.post(url, content=body(2, stream=False))
            while answer.status_code == 503:  # a machine that has much else to do
                assert answer.headers["retry-after"] == "1"
                assert answer.json()["error"]["type"] == "ServiceUnavailableError"
                answer = await client.post(url, content=body(2, stream=False))
            assert answer.status_code == 200
            await until(lambda: outcomes(router) == {"completed": 1}, "it is in the books")


async def test_who_asks_the_deciding_process_itself_waits_as_well(tmp_path: Path) -> None:
    with several(tmp_path) as (_, router):
        async with asyncio.timeout(120), httpx.AsyncClient(timeout=60, trust_env=False) as client:
            assert (await client.get(router.url + "/v1/models")).status_code == 200
            kill(pids(router, DECIDER)[0])
            answer = await client.get(router.url + "/v1/models")
            waited_s = answer.elapsed.total_seconds()
            if answer.status_code != 200:  # a machine that has much else to do
                assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
                assert waited_s > GONE_S / 2


async def test_the_parent(tmp_path: Path) -> None:
    with several(tmp_path) as (fleet, router):
        own = [pid for module in (PROXY, DECIDER) for pid in pids(router, module)]
        async with streaming(fleet, router) as streams:
            router.kill()
            assert len(own) == 3
            assert await completed(fleet, streams) == STREAMS
        await until(lambda: not pids(router, PROXY) + pids(router, DECIDER), "they have ended")
        assert not fleet.unfinished()
        assert "ended; 0 requests in flight, 0 waiting" in router.log_tail()


async def test_one_process_after_the_other(tmp_path: Path) -> None:
    with several(tmp_path) as (fleet, router):
        async with streaming(fleet, router) as streams:
            for module in (PROXY, DECIDER, PROXY, DECIDER):
                kill(pids(router, module)[-1])
                await until(lambda: len(pids(router, PROXY) + pids(router, DECIDER)) == 3, "anew")
                await asyncio.to_thread(wait_all_up, router)
            assert 0 < await completed(fleet, streams) < STREAMS
        await until(lambda: not fleet.unfinished() and not in_flight(router), "all has ended")
        await served(router)
        restarts = samples(router, "evenstep_process_restarts_total")
        assert restarts == {'role="proxy"': 2, 'role="decider"': 2}
