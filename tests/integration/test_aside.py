"""What generates nothing goes to the worker with the least to do, and takes no slot."""

import asyncio
import json
import math
from collections.abc import AsyncIterator

import httpx
import pytest

from router.core.state.breaker import BreakerSettings, BreakerState
from router.proxy.beside_pool import PATHS
from tests.support.clock import put_forward
from tests.support.scripted import Exchange, ScriptedServer, event, scripted, soon, until
from tests.support.serving import Router, serving

Two = tuple[Router, ScriptedServer, ScriptedServer]
BODY = b'{ "model":"tiny", "input":["h\xc3\xa9"] }'
# It never passes by itself.
LONG_S = 30.0


@pytest.fixture
async def two() -> AsyncIterator[Two]:
    """A router before two engines of one slot each."""
    async with (
        scripted(2) as (a, b),
        serving([a, b], slots=1, aliases={"nick": "tiny"}) as router,
    ):
        yield router, a, b


def ask(
    router: Router, path: str = "/v1/embeddings", body: bytes = BODY
) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(router.http.post(path, content=body))


async def load(router: Router) -> int:
    return int((await router.http.get("/load")).json()["server_load"])


async def first_of(*engines: ScriptedServer) -> Exchange:
    """The request that has come to one of them."""
    await until(lambda: any(not engine.idle for engine in engines))
    return await next(engine for engine in engines if not engine.idle).next()


@pytest.mark.parametrize("path", PATHS)
async def test_request_and_answer_pass_unchanged(two: Two, path: str) -> None:
    router, *engines = two
    asked = ask(router, f"{path}?x=%20")

    exchange = await first_of(*engines)

    assert (exchange.method, exchange.target) == ("POST", f"{path}?x=%20")
    assert exchange.body == BODY
    assert exchange.headers["x-request-id"].startswith("es-")
    assert (await load(router), router.in_flight) == (1, 0)
    await exchange.answer(b'{"odd":  1.0}\n', Server_Timing="x")
    answer = await soon(asked)
    assert (answer.status_code, answer.content) == (200, b'{"odd":  1.0}\n')
    assert answer.headers["server-timing"] == "x"
    assert answer.headers["x-request-id"] == exchange.headers["x-request-id"]
    assert await load(router) == 0


async def test_the_worker_with_the_least_to_do_is_chosen(two: Two) -> None:
    router, *engines = two
    generated = [router.post(), router.post(), router.post()]
    exchanges = [await engine.next() for engine in engines]
    await until(lambda: router.waiting == 1)

    asked = [ask(router) for _ in range(4)]
    for engine in engines:
        exchanges += [await engine.next(), await engine.next()]

    assert router.in_flight == 2
    assert await load(router) == 7
    for exchange in exchanges:
        await exchange.answer(b"{}")
    await (await first_of(*engines)).answer(b"{}")
    assert {(await soon(each)).status_code for each in (*asked, *generated)} == {200}
    await router.settled()


@pytest.mark.parametrize("status", [408, 429, 500, 503])
async def test_what_another_worker_may_answer_better_is_asked_there(two: Two, status: int) -> None:
    router, *engines = two
    asked = ask(router)
    await (await first_of(*engines)).answer(b"no", status)
    again = await first_of(*engines)
    await again.answer(b"{}")

    assert (await soon(asked)).status_code == 200
    assert [engine.connections for engine in engines] == [1, 1]
    assert not router.troubles


@pytest.mark.parametrize("status", [400, 404, 422, 501])
async def test_a_clients_mistake_stays_one(two: Two, status: int) -> None:
    router, *engines = two
    asked = ask(router)
    await (await first_of(*engines)).answer(b"no", status, Retry_After="7")

    answer = await soon(asked)
    assert (answer.status_code, answer.content, answer.headers["retry-after"]) == (
        *(status, b"no"),
        "7",
    )


async def test_a_lost_connection_is_made_up_for_elsewhere(two: Two) -> None:
    router, *engines = two
    asked = ask(router)
    (await first_of(*engines)).reset()
    await (await first_of(*engines)).answer(b"{}")

    assert (await soon(asked)).status_code == 200
    assert len(router.troubles) == 1
    assert router.stats.beside == 2
    assert await load(router) == 0


async def test_the_last_engines_own_answer_passes(two: Two) -> None:
    router, *engines = two
    asked = ask(router)
    await (await first_of(*engines)).answer(b"one", 500)
    await (await first_of(*engines)).answer(b"another", 503, Retry_After="3")

    answer = await soon(asked)
    assert (answer.status_code, answer.content) == (503, b"another")
    assert answer.headers["retry-after"] == "3"


async def test_answers_speak_for_a_worker_as_failures_speak_against_it() -> None:
    breakers = BreakerSettings(
        breaker_failures=2, breaker_open_s=LONG_S, breaker_trials=1, slow_start_s=0
    )
    async with (
        scripted(2) as (a, b),
        serving([a, b], breakers=breakers, max_attempts=1) as router,
    ):
        breaker = router.workers[0].breaker

        async def at_a(status: int) -> BreakerState:
            """Have it answer its next request so; what is thought of it then."""
            while True:
                asked = ask(router)
                await until(lambda: not (a.idle and b.idle))
                mine = not a.idle
                exchange = await (a if mine else b).next()
                await exchange.answer(b"{}", status if mine else 200)
                await soon(asked)
                if mine:
                    return breaker.state

        assert [await at_a(status) for status in (500, 200, 500, 500)] == [
            *[BreakerState.CLOSED] * 3,
            BreakerState.OPEN,
        ]
        breaker._out_until_s = -math.inf  # its time is over
        assert [await at_a(status) for status in (400, 200)] == [
            BreakerState.HALF_OPEN,
            BreakerState.CLOSED,
        ]


async def test_a_client_that_gives_it_so_much_time(two: Two) -> None:
    router, *engines = two
    headers = {"X-Request-Timeout-S": str(LONG_S)}
    post = router.http.post("/v1/embeddings", content=BODY, headers=headers)
    asked = asyncio.create_task(post)
    exchange = await first_of(*engines)

    put_forward(LONG_S)

    answer = await soon(asked)
    assert (answer.status_code, answer.json()["error"]["type"]) == (504, "GatewayTimeoutError")
    await exchange.left()
    assert await load(router) == 0


async def test_nobody_is_there(two: Two) -> None:
    router, *_ = two
    router.down("a")
    router.down("b")

    answer = await soon(ask(router))

    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "ServiceUnavailableError"


async def test_any_group_of_the_model_serves_it() -> None:
    async with scripted(3) as engines, serving(engines, groups="xxy") as router:
        asked = [ask(router) for _ in engines]
        for engine in engines:
            await (await engine.next()).answer(b"{}")
        assert {(await soon(each)).status_code for each in asked} == {200}

        router.down("a")
        router.down("b")
        alone = ask(router)
        await (await engines[2].next()).answer(b"{}")
        assert (await soon(alone)).status_code == 200
        beside = {name: each.stats.beside for name, each in router.dispatcher.deciders.items()}
        assert beside == {"x": 2, "y": 2}


async def test_a_client_that_leaves(two: Two) -> None:
    router, *engines = two
    asked = ask(router)
    exchange = await first_of(*engines)

    asked.cancel()

    await exchange.left()
    assert await load(router) == 0


async def test_a_stream_passes_and_ends_with_one_error_if_it_breaks(two: Two) -> None:
    router, *engines = two
    asked = ask(router, "/v1/audio/speech")
    exchange = await first_of(*engines)
    await exchange.start_stream()
    await exchange.chunks(event({"text": "a"}), event({"text": "b"})[:9])
    exchange.close()

    answer = await soon(asked)
    *passed, error = answer.text.removesuffix("\n\n").split("\n\n")
    assert passed == ['data: {"text":"a"}']
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == 502
    assert answer.headers["content-type"].startswith("text/event-stream")


async def test_a_router_that_ends_says_so_in_a_stream(two: Two) -> None:
    router, *engines = two
    streamed = asyncio.create_task(_first_and_rest(router))
    exchange = await first_of(*engines)
    await exchange.start_stream()
    await exchange.chunks(event({"text": "a"}), event({"text": "b"})[:9])

    first, error = await soon(streamed)

    assert first == event({"text": "a"})
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == 503
    await exchange.left()
    assert await load(router) == 0


async def _first_and_rest(router: Router) -> tuple[bytes, bytes]:
    """What comes of a stream before its router ends, and then."""
    async with router.http.stream("POST", "/v1/audio/speech", content=BODY) as answer:
        events = answer.aiter_raw()
        first = await anext(events)
        for task in asyncio.all_tasks():
            if "run_asgi" in repr(task.get_coro()):
                task.cancel("the server ends")
        return first, b"".join([each async for each in events])


@pytest.mark.parametrize(("model", "status"), [("tiny", 200), ("nick", 200), ("huge", 404)])
async def test_a_form_goes_where_its_model_is(two: Two, model: str, status: int) -> None:
    router, *engines = two
    sound = bytes(range(256)) * 8192
    request = router.http.build_request(
        "POST", "/v1/audio/transcriptions", data={"model": model}, files={"file": sound}
    )
    sent = request.read()
    asked = asyncio.create_task(router.http.send(request))
    if status == 200:
        exchange = await first_of(*engines)
        assert exchange.body == sent.replace(b"nick", b"tiny")
        assert exchange.headers["content-type"] == request.headers["content-type"]
        assert exchange.headers["content-length"] == str(len(sent))
        await exchange.answer(b"{}")

    assert (await soon(asked)).status_code == status


async def test_an_alias_is_named_as_the_model_itself(two: Two) -> None:
    router, *engines = two
    for path in ("/v1/embeddings", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        asked = ask(router, path, b'{"model": "nick", "max_tokens": 1}')
        exchange = await first_of(*engines)
        assert exchange.json["model"] == "tiny"
        await exchange.answer(b"{}")
        assert (await soon(asked)).status_code == 200

    cards = (await router.http.get("/v1/models")).json()["data"]
    assert [(card["id"], card.get("root")) for card in cards] == [("tiny", None), ("nick", "tiny")]


@pytest.mark.parametrize("query", [b"\xff", "ä".encode(), b"a=%ff&b='|"])
@pytest.mark.parametrize("path", [b"/v1/completions", b"/tokenize"])
async def test_a_query_passes_byte_for_byte_or_is_refused(
    two: Two, path: bytes, query: bytes
) -> None:
    router, *engines = two
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    size = b"content-length: %d" % len(BODY)
    writer.write(b"POST %b?%b HTTP/1.1\r\nhost: x\r\n%b\r\n\r\n%b" % (path, query, size, BODY))
    status = asyncio.create_task(reader.readline())
    await until(lambda: status.done() or not all(engine.idle for engine in engines))
    if not status.done():
        exchange = await first_of(*engines)
        assert exchange.target.encode("latin-1") == path + b"?" + query
        await exchange.answer(b"{}")
    assert (await soon(status)).split()[1] in (b"200", b"400")
    writer.close()
