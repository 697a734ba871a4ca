"""What the protocol of endpoint pickers demands, from the real Envoy's side."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.envoy.config import manager_of
from router.core.events import SnapshotReceived
from router.core.types import Outcome
from router.pick.ext_proc import NAME
from tests.support.core import running, snapshot
from tests.support.gateway import Gateway, gated, gateway, settled
from tests.support.scripted import ScriptedServer, scripted, soon, token_events, until
from tests.support.server import free_port

DESTINATION, SUBSET = "x-gateway-destination-endpoint", "x-gateway-destination-endpoint-subset"
DONE = b"data: [DONE]\n\n"


def address(engine: ScriptedServer) -> str:
    return engine.url.removeprefix("http://")


def processing(config: Any) -> Any:
    """The settings of ext_proc."""
    return manager_of(config)["http_filters"][0]["typed_config"]


def hinting(subset: Any) -> Any:
    """A change of Envoy's configuration: it hints at a subset of the engines."""

    def change(config: Any) -> None:
        kind = "type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config"
        hint = {"metadata_namespace": "envoy.lb.subset_hint", "value": {SUBSET: subset}}
        told = {"@type": kind, "metadata": [hint]}
        name = "envoy.filters.http.set_metadata"
        manager_of(config)["http_filters"].insert(0, {"name": name, "typed_config": told})

    return change


asked_by_grpc = partial(gated, ext_proc=True)


@pytest.mark.parametrize("as_list", [True, False])
async def test_a_subset_is_kept_to(tmp_path: Path, as_list: bool) -> None:
    async with scripted(3) as engines:
        named = [address(engines[2]), "10.0.0.1:80"]
        subset = named if as_list else ",".join(named)
        async with gateway(tmp_path, engines, ext_proc=True, change=hinting(subset)) as gate:
            asked = [gate.router.post() for _ in range(2)]
            for _ in asked:
                await (await engines[2].next()).answer(b"{}")
            await soon(asyncio.gather(*asked))
            assert engines[0].idle
            assert engines[1].idle
            await settled(gate)


@pytest.mark.parametrize("subset", [["10.0.0.1:80"], []])
async def test_a_subset_that_nobody_fits_is_503(tmp_path: Path, subset: list[str]) -> None:
    async with asked_by_grpc(tmp_path, change=hinting(subset)) as (gate, engines):
        refused = await soon(gate.router.post())

        assert refused.status_code == 503
        assert "subset" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"] == "1"
        assert engines[0].idle


@pytest.mark.parametrize("source", [0, 1], ids=["metadata", "header"])
async def test_metadata_and_header_name_one_destination(tmp_path: Path, source: int) -> None:
    def change(config: Any) -> None:
        engines = config["static_resources"]["clusters"][2]
        policy = engines["load_balancing_policy"]["policies"][0]["typed_extension_config"]
        sources = policy["typed_config"]["override_host_sources"]
        policy["typed_config"]["override_host_sources"] = [sources[source]]

    async with asked_by_grpc(tmp_path, 4, slots=1, change=change) as (gate, engines):
        asked = [gate.router.post() for _ in engines]
        for engine in engines:
            await (await engine.next()).answer(b"{}")
        await soon(asyncio.gather(*asked))
        await settled(gate)


async def test_a_buffered_body_is_held_beyond_the_time_of_messages(tmp_path: Path) -> None:
    def change(config: Any) -> None:
        processing(config)["processing_mode"]["request_body_mode"] = "BUFFERED"
        # The picker's first word may be late on a busy machine: that it asks for more is counted.
        processing(config)["message_timeout"] = "30s"
        processing(config)["max_message_timeout"] = "60s"
        place = {"address": "127.0.0.1", "port_value": admin}
        config["admin"] = {"address": {"socket_address": place}}

    admin = free_port()

    def heard() -> int:
        """How often Envoy was told to wait for longer than the message's own time."""
        name = "override_message_timeout_received"
        told = httpx.get(f"http://127.0.0.1:{admin}/stats?filter={name}").text
        return int(told.rpartition(":")[2])

    known: dict[str, Any] = {"aliases": {"small": "tiny"}, "slots": 1, "change": change}
    async with asked_by_grpc(tmp_path, **known) as (gate, engines):
        holding = gate.router.post()
        exchange = await engines[0].next()
        asked = gate.router.post(model="small")
        await until(lambda: gate.router.waiting == 1 and heard() == 2)
        await exchange.answer(b"{}")
        second = await engines[0].next()
        assert second.json == {"model": "tiny", "prompt": [1, 2, 3]}
        await second.answer(b"{}")
        answers = await soon(asyncio.gather(holding, asked))
        assert [answer.status_code for answer in answers] == [200, 200]
        await settled(gate)


async def test_a_body_that_the_gateway_keeps_is_refused_in_clear_words(tmp_path: Path) -> None:
    def change(config: Any) -> None:
        processing(config)["processing_mode"]["request_body_mode"] = "NONE"
        processing(config)["processing_mode"]["request_trailer_mode"] = "SKIP"

    async with asked_by_grpc(tmp_path, change=change) as (gate, _):
        refused = await soon(gate.router.post())
        assert refused.status_code == 400
        assert "FULL_DUPLEX_STREAMED or BUFFERED" in refused.json()["error"]["message"]


@pytest.mark.parametrize("mode", ["FULL_DUPLEX_STREAMED", "BUFFERED"])
async def test_a_body_has_a_bound(tmp_path: Path, mode: str) -> None:
    def change(config: Any) -> None:
        processing(config)["processing_mode"]["request_body_mode"] = mode
        processing(config)["message_timeout"] = "30s"  # a busy machine takes long for such a body

    most = 6 * 2**20  # more than gRPC allows by itself
    async with asked_by_grpc(tmp_path, change=change, most_bytes=most) as (gate, engines):
        asked = gate.router.post(prompt="a" * (most - 100))
        exchange = await engines[0].next()
        assert len(exchange.json["prompt"]) == most - 100
        await exchange.answer(b"{}")
        assert (await soon(asked)).status_code == 200

        refused = await soon(gate.router.post(prompt="a" * most))
        assert refused.status_code == 413
        assert refused.json()["error"]["message"] == "a request's body may have 6,291,456 bytes"
        assert engines[0].idle
        await settled(gate)


def told_all(config: Any) -> None:
    """Envoy passes answers through the picker, and keeps no log."""
    mode = processing(config)["processing_mode"]
    mode |= {"response_header_mode": "SEND", "response_body_mode": "FULL_DUPLEX_STREAMED"}
    mode |= {"response_trailer_mode": "SEND"}
    del manager_of(config)["access_log"]


@pytest.mark.parametrize("stream", [True, False])
async def test_answers_that_come_through_tell_tokens_and_end(tmp_path: Path, stream: bool) -> None:
    async with asked_by_grpc(tmp_path, change=told_all) as (gate, engines):
        asked = gate.router.post(stream=stream, headers={"x-request-id": "mine"})
        exchange = await engines[0].next()
        if stream:
            body = b"".join([*token_events(3), DONE])
            await exchange.stream(body)
        else:
            body = b'{"usage": {"prompt_tokens": 3, "completion_tokens": 3}}'
            await exchange.answer(body)
        answer = await soon(asked)

        assert answer.content == body
        assert answer.headers["x-request-id"] == "mine"
        await settled(gate)
        assert gate.ends == {"answer": 1}
        assert gate.router.outcomes == {Outcome.COMPLETED: 1}


def told_heads(config: Any) -> None:
    """As a gateway of the Gateway API does it: heads of answers, and no log."""
    processing(config)["processing_mode"]["response_header_mode"] = "SEND"
    processing(config)["response_attributes"] = ["upstream.address"]
    del manager_of(config)["access_log"]


async def test_without_a_log_snapshots_tell_the_end(tmp_path: Path) -> None:
    async with asked_by_grpc(tmp_path, change=told_heads) as (gate, engines):

        def show(number: int, *told: Any, finished: tuple[str, ...] = ()) -> None:
            shown = snapshot("full", number, *told, finished=finished)
            gate.router.dispatcher.apply(SnapshotReceived("a", shown, time.monotonic()))

        show(1)
        asked = gate.router.post()
        exchange = await engines[0].next()
        engine_id = f"cmpl-{exchange.headers['x-request-id']}-0"
        show(2, running(engine_id))
        await exchange.answer(b"{}")
        await soon(asked)
        assert gate.picks.counts.open == 1
        show(3, finished=(engine_id,))

        await settled(gate)
        assert gate.ends == {"snapshot": 1}
        assert gate.router.outcomes == {Outcome.COMPLETED: 1}


async def test_with_neither_the_end_of_the_call_counts(tmp_path: Path) -> None:
    async with asked_by_grpc(tmp_path, change=told_heads) as (gate, engines):
        asked = gate.router.post()
        await (await engines[0].next()).answer(b"{}")
        await soon(asked)

        await settled(gate)
        assert gate.ends == {"stream": 1}


async def test_an_error_at_the_head_ends_it_at_once(tmp_path: Path) -> None:
    def change(config: Any) -> None:
        told_heads(config)
        route = manager_of(config)["route_config"]["virtual_hosts"][0]["routes"][0]["route"]
        del route["retry_policy"]

    async with asked_by_grpc(tmp_path, change=change) as (gate, engines):
        asked = gate.router.post()
        await (await engines[0].next()).answer(b"{}", status=500)
        assert (await soon(asked)).status_code == 500

        await settled(gate)
        assert gate.ends == {"answer": 1}
        assert gate.router.outcomes == {Outcome.FAILED: 1}


async def test_the_head_tells_which_endpoint_answers(tmp_path: Path) -> None:
    async with asked_by_grpc(tmp_path, 2, change=told_heads) as (gate, engines):
        asked = gate.router.post()
        await (await engines[0].next()).answer(b"{}", status=503)
        await (await engines[1].next()).answer(b'{"from": "b"}')

        assert (await soon(asked)).json() == {"from": "b"}
        await settled(gate)
        assert gate.picks.counts.moved == 1


async def test_models_are_renamed_and_responses_named(tmp_path: Path) -> None:
    async with asked_by_grpc(tmp_path, aliases={"small": "tiny"}) as (gate, engines):
        asked = gate.router.post("/v1/responses", model="small", input="a")
        exchange = await engines[0].next()
        assert exchange.json["model"] == "tiny"
        token = exchange.headers["x-request-id"]
        assert exchange.json["request_id"] == f"resp_{token}"
        await exchange.answer(b"{}")
        assert (await soon(asked)).status_code == 200
        await settled(gate)


@asynccontextmanager
async def channel(gate: Gateway) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{gate.grpc}") as opened:
        yield opened


async def spoken(gate: Gateway, messages: Iterable[Any]) -> list[Any]:
    """What the picker answers a gateway that says this."""
    async with channel(gate) as opened:
        call = opened.stream_stream(
            f"/{NAME}/Process",
            pb.ProcessingRequest.SerializeToString,
            pb.ProcessingResponse.FromString,
        )(iter(messages))
        return [answer async for answer in call]


def head(**headers: str) -> Any:
    message = pb.ProcessingRequest()
    message.protocol_config.request_body_mode = 4  # FULL_DUPLEX_STREAMED
    for key, value in {":method": "POST", ":path": "/v1/completions", **headers}.items():
        message.request_headers.headers.headers.add(key=key, raw_value=value.encode())
    return message


async def test_trailers_end_a_body(tmp_path: Path) -> None:
    async with asked_by_grpc(tmp_path) as (gate, engines):
        part, trailers = pb.ProcessingRequest(), pb.ProcessingRequest()
        part.request_body.body = b'{"model": "tiny", "prompt": [1]}'
        trailers.request_trailers.SetInParent()
        answers = await soon(spoken(gate, [head(), part, trailers]))

        first, body, last = answers
        headers = first.request_headers.response.header_mutation.set_headers
        told = {each.header.key: each.header.raw_value.decode() for each in headers}
        assert told[DESTINATION] == address(engines[0])
        assert first.dynamic_metadata["envoy.lb"][DESTINATION] == told[DESTINATION]
        assert first.request_headers.response.clear_route_cache
        assert not body.request_body.response.body_mutation.streamed_response.end_of_stream
        assert last.WhichOneof("response") == "request_trailers"


async def test_health_services(tmp_path: Path) -> None:
    async with asked_by_grpc(tmp_path) as (gate, _), channel(gate) as opened:
        health = health_pb2_grpc.HealthStub(opened)

        async def status(service: str) -> str:
            asked = health_pb2.HealthCheckRequest(service=service)
            answer = await health.Check(asked)
            return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

        services = ["liveness", "readiness", "", NAME]
        assert [await status(each) for each in services] == ["SERVING"] * 4
        gate.picks._context.lifecycle.draining = True
        assert [await status(each) for each in services] == ["SERVING", *["NOT_SERVING"] * 3]
        with pytest.raises(grpc.aio.AioRpcError, match="no service 'other'"):
            await status("other")


async def test_what_is_held_at_the_end_is_503(tmp_path: Path) -> None:
    async with asked_by_grpc(tmp_path, slots=1) as (gate, engines):
        holding = gate.router.post()
        exchange = await engines[0].next()
        held = gate.router.post()
        await until(lambda: gate.router.waiting == 1)

        gate.picks._context.lifecycle.closed = True
        for task in set(gate.router.tasks):
            task.cancel()

        refused = await soon(held)
        assert refused.status_code == 503
        assert "ending" in refused.json()["error"]["message"]
        await exchange.answer(b"{}")
        assert (await soon(holding)).status_code == 200
        await settled(gate)
