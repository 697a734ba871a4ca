"""What the router itself answers: errors in OpenAI's form, and what operators ask for."""

import asyncio
import logging
from collections.abc import AsyncIterator
from importlib.metadata import version

import httpx
import pytest

from router.core.policies.bfio.policy import BfIo
from router.core.types import Outcome
from router.proxy.endpoints import ENDPOINTS
from tests.support.core import requests, views
from tests.support.scripted import ScriptedServer, scripted, soon, until
from tests.support.serving import Router, serving

One = tuple[Router, ScriptedServer]


@pytest.fixture
async def one() -> AsyncIterator[One]:
    """A router before one engine."""
    async with scripted() as (engine,), serving([engine], slots=1, pool_size=1) as router:
        yield router, engine


def assert_error(
    answer: httpx.Response, status: int, kind: str, message: str, param: str | None = None
) -> None:
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    said = answer.json()
    error = said.pop("error")
    if answer.request.url.path == "/v1/messages":
        assert said == {"type": "error"}
        error |= {"param": param, "code": status}
    assert answer.headers["x-request-id"].startswith("es-")
    assert message in error.pop("message")
    assert error == {"type": kind, "param": param, "code": status}


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        (b"", "not valid JSON", None),
        (b"{", "not valid JSON", None),
        (b"[]", "should be a JSON object", None),
        (b'{"model": 3}', "'model' should be a string", "model"),
    ],
)
async def test_bad_requests(
    one: One, path: str, body: bytes, message: str, param: str | None
) -> None:
    router, engine = one

    answer = await router.http.post(path, content=body)

    assert_error(answer, 400, "BadRequestError", message, param)
    assert engine.connections == 0


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_an_unknown_model(one: One, path: str) -> None:
    answer = await one[0].http.post(path, json={"model": "huge"})

    assert_error(answer, 404, "NotFoundError", "`huge` does not exist", "model")


async def test_of_one_group_no_model_need_be_named(one: One) -> None:
    router, engine = one
    asked = asyncio.create_task(router.http.post("/v1/completions", json={}))
    await (await engine.next()).answer(b"{}")

    assert (await soon(asked)).status_code == 200


async def test_an_unknown_path(one: One) -> None:
    assert_error(await one[0].http.post("/v1/nothing"), 404, "NotFoundError", "Not Found")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [(method, path, "POST") for method in ("GET", "PUT", "DELETE") for path in ENDPOINTS]
    + [("POST", path, "GET") for path in ("/v1/models", "/health", "/version", "/metrics")],
)
async def test_a_wrong_method(one: One, method: str, path: str, allowed: str) -> None:
    answer = await one[0].http.request(method, path)

    assert_error(answer, 405, "MethodNotAllowedError", "Method Not Allowed")
    assert answer.headers["allow"] == allowed


async def test_a_full_pool(one: One) -> None:
    router, engine = one
    served = router.post()
    exchange = await engine.next()
    waiting = router.post()
    await until(lambda: router.waiting == 1)

    answer = await soon(router.post())

    assert_error(answer, 429, "TooManyRequestsError", "pool is full (1 requests)")
    assert int(answer.headers["retry-after"]) >= 1
    await exchange.answer(b"{}")
    await (await engine.next()).answer(b"{}")
    assert [(await soon(task)).status_code for task in (served, waiting)] == [200, 200]
    assert (router.stats.rejected, router.outcomes) == (1, {Outcome.COMPLETED: 2})
    await router.settled()


async def test_no_worker(one: One) -> None:
    router, _ = one
    router.down("a")

    answer = await soon(router.post())

    assert_error(answer, 503, "ServiceUnavailableError", "no worker of group 'default' is up")
    assert answer.headers["retry-after"] == "1"


async def test_the_last_worker_goes_down_while_requests_wait(one: One) -> None:
    router, engine = one
    served = router.post()
    exchange = await engine.next()
    waiting = router.post()
    await until(lambda: router.waiting == 1)

    router.down("a")

    assert_error(await soon(waiting), 503, "ServiceUnavailableError", "is up (a: gone)")
    await exchange.answer(b"{}")
    assert (await soon(served)).status_code == 200
    await router.settled()


async def test_a_slot_that_does_not_become_free_in_time() -> None:
    async with scripted() as (engine,), serving([engine], slots=1) as router:
        served = router.post()
        exchange = await engine.next()

        answer = await soon(router.post(headers={"X-Queue-Timeout-S": "0.05"}))

        assert_error(answer, 503, "ServiceUnavailableError", "no slot became free within 0.05 s")
        await exchange.answer(b"{}")
        await soon(served)
        assert router.outcomes == {Outcome.COMPLETED: 1, Outcome.EXPIRED: 1}
        await router.settled()


async def test_a_client_that_leaves_while_it_sends(
    one: One, caplog: pytest.LogCaptureFixture
) -> None:
    router, engine = one
    _, writer = await asyncio.open_connection("127.0.0.1", router.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{")
    await writer.drain()
    writer.close()
    await writer.wait_closed()

    asked = router.post()
    await (await engine.next()).answer(b"{}")
    await soon(asked)

    # Lines of requests are no warnings; they come where an earlier test has lowered the level.
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert router.outcomes == {Outcome.COMPLETED: 1}


async def test_models(one: One) -> None:
    answer = (await one[0].http.get("/v1/models")).json()

    assert answer["object"] == "list"
    (card,) = answer["data"]
    assert (card["id"], card["object"]) == ("tiny", "model")


async def test_health(one: One) -> None:
    router, engine = one
    answer = await router.http.get("/health")
    assert (answer.status_code, answer.json()["status"]) == (200, "ok")
    (worker,) = answer.json()["groups"]["default"]["workers"]
    assert (worker["id"], worker["url"], worker["up"]) == ("a", engine.url, True)
    assert (worker["slots"], worker["free_slots"], worker["snapshots"]) == (1, 1, "none")

    router.down("a")

    answer = await router.http.get("/health")
    assert (answer.status_code, answer.json()["status"]) == (503, "unavailable")
    (worker,) = answer.json()["groups"]["default"]["workers"]
    assert (worker["up"], worker["down_reason"]) == (False, "gone")


async def test_version_and_metrics(one: One) -> None:
    http = one[0].http

    assert (await http.get("/version")).json() == {"version": version("evenstep")}
    metrics = await http.get("/metrics")
    assert metrics.text == "metric 1\n"
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")


async def test_what_nobody_expected_is_said_in_the_same_form(
    one: One, monkeypatch: pytest.MonkeyPatch
) -> None:
    router, _ = one

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(router.dispatcher, "submit", fail)

    assert_error(await soon(router.post()), 500, "InternalServerError", "internal error")


async def test_the_program_of_the_last_round_can_be_looked_at(one: One) -> None:
    router, _ = one
    decider = router.dispatcher.deciders["default"]
    policy = BfIo(0.1)
    policy.assign(requests([50]), views([100, 60]))
    decider.solved = policy.last

    answer = await router.http.get("/debug/instance")
    assert answer.status_code == 200
    assert len(answer.json()["loads"]) == 2

    decider.solved = None
    for group in ("default", "other"):
        answer = await router.http.get("/debug/instance", params={"group": group})
        message = f"bfio solved nothing in the last round of group '{group}'"
        assert_error(answer, 404, "NotFoundError", message)
