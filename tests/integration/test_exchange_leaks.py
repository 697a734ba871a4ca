"""Requests that are over: nothing of them is left, without a garbage collector."""

import gc
from collections.abc import Iterator

import pytest

from router.http.port import DataPlane
from router.proxy.relay import Relay
from router.proxy.splice import Exchange
from tests.support.relaying import RawClient, routed
from tests.support.scripted import DONE, soon, token_events, until

TOKENS = token_events(3)


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def left() -> list[object]:
    return [one for one in gc.get_objects() if type(one) in (Exchange, Relay)]


@pytest.mark.usefixtures("uncollected")
async def test_nothing_is_left_of_a_request() -> None:
    async with routed(plane=DataPlane.SPLICE) as (router, (engine,)):
        for stream in (True, False):
            asked = router.post(stream=stream)
            exchange = await engine.next()
            if stream:
                await exchange.stream(*TOKENS, DONE)
            else:
                await exchange.answer(b"{}")
            assert (await soon(asked)).status_code == 200
        assert (await soon(router.post(model="other"))).status_code == 404
        await until(lambda: not router.tasks)
        assert len(router.connections) == 1
        await until(lambda: left() == [])  # the loop may hold a call of theirs for a turn


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("length", [None, -1], ids=["in its stream", "in its body"])
async def test_nothing_is_left_of_who_leaves(length: int | None) -> None:
    async with routed(plane=DataPlane.SPLICE) as (router, (engine,)):
        async with RawClient(router) as client:
            await client.post(length, stream=True)
            if length is None:
                exchange = await engine.next()
                await exchange.start_stream()
                await exchange.chunks(TOKENS[0])
                await soon(client.read_until(TOKENS[0]))
            else:
                await until(lambda: bool(router.tasks))
        await until(lambda: not router.tasks and not router.connections)
        await until(lambda: left() == [])  # the loop may hold a call of theirs for a turn
