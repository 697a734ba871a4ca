"""How a router ends: nobody is lost while it drains, and who is cut short is told so once."""

import asyncio
import json
import signal
from pathlib import Path

import httpx
import pytest

from router.engines.http_client import HttpClient
from tests.support.chaos import Seen, ask, body
from tests.support.fleet import running_fleet, worker_flags
from tests.support.server import Server, running_router, wait_until

QUICK_START = ("--policy", "least_tokens")
ENDLESS = body(100_000)  # hours of steps


def ended_well(router: Server) -> bool:
    """The process has ended by itself, with nothing left that it counts."""
    assert router.process.wait(timeout=60) == 0, router.log_tail()
    return "ended; 0 requests in flight, 0 waiting" in router.log_tail()


def refuses(router: Server) -> bool:
    try:
        return router.get("/version").status_code < 0
    except httpx.ConnectError:
        return True
    except httpx.NetworkError:
        return False  # closed in the moment of the connection, which is reset: look again


def draining(router: Server) -> bool:
    answer = router.get("/health")
    return answer.status_code == 503 and answer.json()["status"] == "draining"


@pytest.mark.parametrize("signals", [1, 2])
async def test_two_hundred_streams_end_once_each(tmp_path: Path, signals: int) -> None:
    """When the grace is over, or somebody is in a hurry."""
    grace = ("--grace", "1" if signals == 1 else "600")
    flags = ("--workers", "2", "--slots", "100", "--time-scale", "4")
    with (
        running_fleet(tmp_path, *flags) as fleet,
        running_router(tmp_path, *worker_flags(fleet), *QUICK_START, *grace) as router,
    ):
        client = HttpClient()
        streams = [Seen() for _ in range(200)]
        waiting = [Seen() for _ in range(5)]
        async with asyncio.timeout(120):
            asked = [asyncio.create_task(ask(client, router, one, ENDLESS)) for one in streams]
            await asyncio.gather(*(one.first.wait() for one in streams))
            late = [body(900, stream=number % 2 == 0) for number in range(len(waiting))]
            asked += [
                asyncio.create_task(ask(client, router, *one))
                for one in zip(waiting, late, strict=True)
            ]
            await asyncio.to_thread(wait_until, lambda: pool_of(router) == 5, 60, "five wait")
            router.process.send_signal(signal.SIGTERM)
            router.process.send_signal(signal.SIGINT)  # the same wish, as a terminal may say it
            if signals == 2:
                await asyncio.to_thread(wait_until, lambda: refuses(router), 60, "it is closed")
                await asyncio.sleep(0.3)  # sooner it would be that still
                router.process.send_signal(signal.SIGTERM)
            await asyncio.gather(*asked)
            assert await asyncio.to_thread(ended_well, router)
        assert [one.status for one in streams] == [200] * 200
        assert [one.errors for one in streams] == [1] * 200
        assert not any(one.complete for one in streams)
        assert [one.status for one in waiting] == [503] * 5
        await asyncio.to_thread(wait_until, lambda: not fleet.unfinished(), 60, "engines are idle")
        await client.aclose()


def pool_of(router: Server) -> int:
    return int(router.get("/health").json()["groups"]["default"]["pool_requests"])


async def test_draining_takes_new_requests_then_turns_them_away(tmp_path: Path) -> None:
    flags = ("--drain-delay", "10", "--health-interval", "60", *QUICK_START)
    with (
        running_fleet(tmp_path, "--slots", "4", "--time-scale", "2") as fleet,
        running_router(tmp_path, *worker_flags(fleet), *flags) as router,
    ):
        client, stream = HttpClient(), Seen()
        kept = httpx.Limits(keepalive_expiry=None)
        idle = httpx.AsyncClient(base_url=router.url, timeout=60, trust_env=False, limits=kept)
        async with asyncio.timeout(120):
            assert "connection" not in (await idle.get("/version")).headers
            asked = asyncio.create_task(ask(client, router, stream, body(900)))
            await stream.first.wait()

            router.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(wait_until, lambda: draining(router), 60, "it drains")
            answer = await asyncio.to_thread(
                httpx.post,
                router.url + "/v1/completions",
                content=body(2, stream=False),
                timeout=60,
            )
            assert (answer.status_code, answer.headers["connection"]) == (200, "close")

            await asyncio.to_thread(fleet.fault, 0, "hang")  # the stream goes on when we say so
            await asyncio.to_thread(wait_until, lambda: refuses(router), 60, "it is closed")
            turned_away = await idle.post("/v1/completions", content=body(2))
            assert (turned_away.status_code, turned_away.headers["connection"]) == (503, "close")
            assert turned_away.json()["error"]["type"] == "ServiceUnavailableError"

            await asyncio.to_thread(fleet.restore, 0)
            await asked
            assert stream.complete
            assert await asyncio.to_thread(ended_well, router)
        await idle.aclose()
        await client.aclose()


async def test_each_request_has_one_line_that_says_nothing_of_its_text(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("me sesame-open-yourself\n")
    keys.chmod(0o600)
    log = ("--log-format", "json", "--log-level", "debug")
    flags = (*log, "--api-key-file", str(keys), *QUICK_START)
    with (
        running_fleet(tmp_path, "--slots", "4") as fleet,
        running_router(tmp_path, *worker_flags(fleet), *flags) as router,
    ):
        prompt = {"model": "emulated", "prompt": "Whose secret is this?", "max_tokens": 3}
        async with httpx.AsyncClient(base_url=router.url, timeout=60, trust_env=False) as client:
            client.headers["authorization"] = "Bearer sesame-open-yourself"
            headers = {"x-request-id": "mine"}
            await client.post("/v1/completions?text=Whose", json=prompt, headers=headers)
            await client.post("/v1/completions", content=b'{"prompt": "Whose secret')
            await client.get("/v1/nothing%20here")
            await client.post("/v1/completions", headers={"authorization": "Bearer sesame"})
        router.stop()
        lines = [json.loads(line) for line in router.log.read_text().splitlines()]

    served, refused, unknown = (line for line in lines if line.get("method") == "POST")
    assert (
        served.items()
        >= {
            "request_id": "mine",
            "key": "me",
            "path": "/v1/completions",
            "status": 200,
            "model": "emulated",
            "group": "default",
            "worker": served["worker"],
            "outcome": "completed",
            "output_tokens": 3,
            "attempts": 1,
        }.items()
    )
    assert 0 < served["ttft_s"] <= served["duration_s"]
    assert (refused["status"], refused["key"], "outcome" in refused) == (400, "me", False)
    assert (unknown["status"], "key" in unknown) == (401, False)
    assert [line["path"] for line in lines if line.get("status") == 404] == ["/v1/nothing here"]
    text = router.log.read_text()
    assert "Whose" not in text
    assert "sesame" not in text
    assert not [line for line in lines if line["logger"].startswith("uvicorn")]
