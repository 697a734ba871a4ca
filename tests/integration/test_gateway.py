"""The real Envoy asks where requests go, by ext_authz and by ext_proc: what holds for both."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

import httpx
import pytest

from router.core.types import Outcome
from tests.support.gateway import Gateway, gated, settled
from tests.support.scripted import ScriptedServer, soon, token_events, until

DONE = b"data: [DONE]\n\n"
Opened = Callable[..., AbstractAsyncContextManager[tuple[Gateway, list[ScriptedServer]]]]


@pytest.fixture(params=[False, True], ids=["ext_authz", "ext_proc"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Opened:
    """Before so many engines."""
    return partial(gated, tmp_path, ext_proc=request.param)


async def test_requests_wait_for_a_slot_and_are_sent_then(opened: Opened) -> None:
    async with opened(2, slots=1) as (gate, engines):
        asked = [gate.router.post() for _ in range(3)]
        first = [await engine.next() for engine in engines]
        await until(lambda: gate.router.waiting == 1)
        assert [each.headers["x-request-id"][:3] for each in first] == ["es-", "es-"]
        assert first[0].json == {"model": "tiny", "prompt": [1, 2, 3]}

        await first[1].answer(b'{"it": "is"}')

        third = await engines[1].next()
        assert gate.router.waiting == 0
        await third.answer(b"{}")
        await first[0].answer(b"{}")
        answers = await soon(asyncio.gather(*asked))
        assert [answer.status_code for answer in answers] == [200, 200, 200]
        await settled(gate)
        assert gate.router.outcomes == {Outcome.COMPLETED: 3}
        assert gate.ends == {"log": 3}


async def test_a_prompt_counts_as_cached_where_its_answer_begins_or_nobody_tells(
    opened: Opened, request: pytest.FixtureRequest
) -> None:
    over_grpc = "ext_proc" in request.node.name
    async with opened(2) as (gate, engines):
        asked = gate.router.post(prompt=[*range(1, 300)])
        exchange = await engines[0].next()
        prefixes = gate.router.dispatcher.cluster.groups["default"].prefixes
        assert prefixes.guessed == (0 if over_grpc else 1)

        await exchange.answer(b"{}")

        assert (await soon(asked)).status_code == 200
        await settled(gate)
        assert prefixes.guessed == 1


async def test_streams_come_through(opened: Opened) -> None:
    async with opened() as (gate, engines):
        asked = gate.router.post(stream=True)
        exchange = await engines[0].next()
        events = [*token_events(3), DONE]
        await exchange.stream(*events)

        assert (await soon(asked)).content == b"".join(events)
        await settled(gate)
        assert gate.router.outcomes == {Outcome.COMPLETED: 1}
        assert sum(gate.router.stats.ttft_s.counts) == 1


async def test_a_client_leaves_while_its_request_is_held(opened: Opened) -> None:
    async with opened(slots=1) as (gate, engines):
        holding = gate.router.post()
        exchange = await engines[0].next()
        leaving = gate.router.post()
        await until(lambda: gate.router.waiting == 1)

        leaving.cancel()

        await until(lambda: gate.router.waiting == 0)
        assert gate.router.outcomes == {Outcome.ABORTED: 1}
        await exchange.answer(b"{}")
        assert (await soon(holding)).status_code == 200
        assert engines[0].idle
        await settled(gate)


async def test_a_client_leaves_in_mid_stream(opened: Opened) -> None:
    async with opened() as (gate, engines):
        asked = gate.router.post(stream=True)
        exchange = await engines[0].next()
        await exchange.start_stream()
        await exchange.chunks(*token_events(1))
        await until(lambda: gate.router.in_flight == 1)

        asked.cancel()

        await exchange.left()
        await settled(gate)
        assert gate.router.outcomes == {Outcome.ABORTED: 1}


async def test_a_client_leaves_before_the_first_byte(opened: Opened) -> None:
    async with opened() as (gate, engines):
        asked = gate.router.post()
        exchange = await engines[0].next()

        asked.cancel()

        await exchange.left()
        await settled(gate)
        assert gate.router.outcomes == {Outcome.ABORTED: 1}


async def test_refusals_keep_their_status(opened: Opened) -> None:
    async with opened() as (gate, engines):
        wrong = await soon(gate.router.http.post("/v1/completions", content=b"[1"))
        unknown = await soon(gate.router.post(model="other"))
        assert wrong.status_code == 400
        assert "JSON" in wrong.json()["error"]["message"]
        assert unknown.status_code == 404
        assert unknown.json()["error"]["type"] == "NotFoundError"
        assert engines[0].idle
        await settled(gate)


async def test_a_full_pool_is_429_and_says_when_to_retry(opened: Opened) -> None:
    async with opened(slots=1, pool_size=1) as (gate, engines):
        holding = [gate.router.post()]
        exchange = await engines[0].next()
        holding.append(gate.router.post())
        await until(lambda: gate.router.waiting == 1)

        refused = await soon(gate.router.post())

        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "TooManyRequestsError"
        await exchange.answer(b"{}")
        await (await engines[0].next()).answer(b"{}")
        await soon(asyncio.gather(*holding))
        await settled(gate)


async def test_nobody_in_time_is_503(opened: Opened) -> None:
    async with opened(slots=1) as (gate, engines):
        holding = gate.router.post()
        exchange = await engines[0].next()

        late = await soon(gate.router.post(headers={"x-queue-timeout-s": "0.2"}))

        assert late.status_code == 503
        assert late.headers["retry-after"] == "1"
        assert late.json()["error"]["type"] == "ServiceUnavailableError"
        await exchange.answer(b"{}")
        await soon(holding)
        await settled(gate)


async def test_the_next_endpoint_serves_what_the_first_refuses(opened: Opened) -> None:
    async with opened(2, slots=2) as (gate, engines):
        asked = gate.router.post()
        await (await engines[0].next()).answer(b"{}", status=503)

        exchange = await engines[1].next()
        await exchange.answer(b'{"from": "b"}')

        assert (await soon(asked)).json() == {"from": "b"}
        await settled(gate)
        assert gate.picks.counts.moved == 1
        assert gate.router.outcomes == {Outcome.COMPLETED: 1}


async def test_the_next_endpoint_serves_where_the_first_is_gone(opened: Opened) -> None:
    async with opened(2) as (gate, engines):
        await engines[0].stop()
        asked = gate.router.post()
        await (await engines[1].next()).answer(b'{"from": "b"}')

        assert (await soon(asked)).json() == {"from": "b"}
        await settled(gate)
        assert gate.router.troubles == ["a"]


async def test_an_engine_that_breaks_off_is_at_fault(opened: Opened) -> None:
    async with opened() as (gate, engines):
        asked = gate.router.post(stream=True)
        exchange = await engines[0].next()
        await exchange.start_stream()
        await exchange.chunks(*token_events(1))
        await until(lambda: gate.router.in_flight == 1)
        exchange.reset()

        with pytest.raises(httpx.RemoteProtocolError):
            await soon(asked)
        await until(lambda: not gate.picks.counts.open)
        assert gate.router.outcomes == {Outcome.FAILED: 1}
        assert gate.router.troubles == ["a"]


async def test_a_client_cannot_choose_its_worker(opened: Opened) -> None:
    async with opened(2) as (gate, engines):
        forged = {
            "x-gateway-destination-endpoint": engines[1].url.removeprefix("http://"),
            "x-request-id": "mine",
            "x-data-parallel-rank": "7",
        }
        asked = gate.router.post(headers=forged)
        exchange = await engines[0].next()

        assert exchange.headers["x-request-id"].endswith(".mine")
        assert "x-data-parallel-rank" not in exchange.headers
        await exchange.answer(b"{}")
        assert (await soon(asked)).status_code == 200
        await settled(gate)


async def test_ranks_behind_one_url_are_named(opened: Opened) -> None:
    async with opened(ranks=2, slots=1) as (gate, engines):
        asked = [gate.router.post(), gate.router.post()]
        exchanges = [await engines[0].next(), await engines[0].next()]

        assert {each.headers["x-data-parallel-rank"] for each in exchanges} == {"0", "1"}
        for exchange in exchanges:
            await exchange.answer(b"{}")
        await soon(asyncio.gather(*asked))
        await settled(gate)


async def test_a_large_body_comes_through_whole(opened: Opened) -> None:
    async with opened() as (gate, engines):
        prompt = "word " * 200_000
        asked = gate.router.post(prompt=prompt)
        exchange = await engines[0].next()

        assert exchange.json["prompt"] == prompt
        await exchange.answer(b"{}")
        assert (await soon(asked)).status_code == 200
        await settled(gate)


async def test_others_go_to_any_worker_at_once(opened: Opened) -> None:
    async with opened(slots=1) as (gate, engines):
        holding = gate.router.post()
        exchange = await engines[0].next()
        listing = asyncio.create_task(gate.router.http.get("/v1/models"))
        embedding = asyncio.create_task(
            gate.router.http.post("/v1/embeddings", json={"model": "tiny", "input": "a"})
        )
        for _ in range(2):
            await (await engines[0].next()).answer(b'{"aside": 1}')
        assert (await soon(listing)).json() == {"aside": 1}
        assert (await soon(embedding)).json() == {"aside": 1}
        await exchange.answer(b"{}")
        await soon(holding)
        await settled(gate)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/metrics"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/internal/route/end"),
        ("GET", "/v1/completions"),
        ("DELETE", "/v1/models"),
    ],
)
async def test_what_serve_does_not_pass_on_is_not_asked_of_engines(
    opened: Opened, method: str, path: str
) -> None:
    async with opened() as (gate, engines):
        refused = await soon(gate.router.http.request(method, path))
        assert refused.status_code == 404
        assert refused.json()["error"]["message"] == f"{method} {path} is not served"
        assert engines[0].idle


async def test_others_are_dealt_evenly(opened: Opened) -> None:
    async with opened(2, slots=1) as (gate, engines):
        for engine in (*engines, *engines):
            body = {"model": "tiny", "input": "a"}
            asked = asyncio.create_task(gate.router.http.post("/v1/embeddings", json=body))
            await (await engine.next()).answer(b"{}")
            assert (await soon(asked)).status_code == 200
        await settled(gate)


async def test_prefill_workers_are_named_in_turn(opened: Opened) -> None:
    async with opened(3, prefills=2, slots=2) as (gate, engines):
        named = []
        for _ in range(4):
            asked = gate.router.post()
            exchange = await engines[2].next()
            named.append(exchange.headers["x-prefiller-host-port"])
            await exchange.answer(b"{}")
            assert (await soon(asked)).status_code == 200
        addresses = [engine.url.removeprefix("http://") for engine in engines[:2]]
        assert named == [*addresses, *addresses]

        for worker in "ab":
            gate.router.down(worker)
        asked = gate.router.post(headers={"x-prefiller-host-port": "10.0.0.1:22"})
        exchange = await engines[2].next()
        assert "x-prefiller-host-port" not in exchange.headers
        await exchange.answer(b"{}")
        assert (await soon(asked)).status_code == 200
        await settled(gate)


async def test_targets_by_the_names_of_llm_d_count(opened: Opened) -> None:
    async with opened() as (gate, engines):
        for milliseconds in ("60000", "0.001"):
            asked = gate.router.post(stream=True, headers={"x-llm-d-slo-ttft-ms": milliseconds})
            await (await engines[0].next()).stream(*token_events(3), DONE)
            assert (await soon(asked)).status_code == 200
        await settled(gate)
        verdicts = {name: count for name, count in gate.router.stats.verdicts.items() if count}
        assert verdicts.pop("met") == 1
        assert sum(verdicts.values()) == 1
