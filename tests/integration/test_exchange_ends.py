"""Two ends of a request in one turn of the event loop: it is counted once, and nothing is left."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable
from itertools import permutations

import pytest

from router.core.errors import UpstreamError
from router.http.port import DataPlane
from tests.support.relaying import RawClient, routed
from tests.support.scripted import DONE, ScriptedServer, soon, token_events, until
from tests.support.serving import Router

TOKENS = token_events(3)
BODY = json.dumps({"model": "tiny", "prompt": [1, 2, 3], "stream": True}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(BODY)


# Where a request can be when it is ended.


@contextlib.asynccontextmanager
async def in_its_body(router: Router, _: ScriptedServer, client: RawClient) -> AsyncIterator[None]:
    client.writer.write(HEAD + BODY[:-1])
    await until(lambda: bool(router.tasks))
    await asyncio.sleep(0)
    yield


@contextlib.asynccontextmanager
async def in_the_pool(router: Router, _: ScriptedServer, client: RawClient) -> AsyncIterator[None]:
    router.dispatcher.drain("a", draining=True)
    client.writer.write(HEAD + BODY)
    await until(lambda: router.waiting == 1)
    yield
    router.dispatcher.drain("a", draining=False)


@contextlib.asynccontextmanager
async def unanswered(
    router: Router, engine: ScriptedServer, client: RawClient
) -> AsyncIterator[None]:
    client.writer.write(HEAD + BODY)
    exchange = await engine.next()
    yield
    exchange.ended.set()


@contextlib.asynccontextmanager
async def without_an_event(
    router: Router, engine: ScriptedServer, client: RawClient
) -> AsyncIterator[None]:
    client.writer.write(HEAD + BODY)
    exchange = await engine.next()
    await exchange.start_stream()
    await until(lambda: bool(router.upstream.answers))
    yield
    exchange.ended.set()


@contextlib.asynccontextmanager
async def in_its_stream(
    router: Router, engine: ScriptedServer, client: RawClient
) -> AsyncIterator[None]:
    client.writer.write(HEAD + BODY)
    exchange = await engine.next()
    await exchange.start_stream()
    await exchange.chunks(TOKENS[0])
    await soon(client.read_until(TOKENS[0]))
    yield
    exchange.ended.set()


@contextlib.asynccontextmanager
async def behind_its_last_event(
    router: Router, engine: ScriptedServer, client: RawClient
) -> AsyncIterator[None]:
    client.writer.write(HEAD + BODY)
    exchange = await engine.next()
    await exchange.start_stream()
    await exchange.chunks(*TOKENS, DONE)
    await soon(client.read_until(DONE))
    yield
    exchange.ended.set()


PHASES = [
    in_its_body,
    in_the_pool,
    unanswered,
    without_an_event,
    in_its_stream,
    behind_its_last_event,
]


# What ends it.


def client_leaves(router: Router) -> None:
    for connection in router.connections:
        connection.transport.abort()


def server_ends(router: Router) -> None:
    for task in router.tasks:
        task.cancel("the router ends")


def engine_breaks_off(router: Router) -> None:
    for response in router.upstream.answers:
        response.break_off(UpstreamError("broken off"))


def worker_is_recalled(router: Router) -> None:
    router.attempts.recall("a", "silent")


def attempts_are_ended(router: Router) -> None:
    router.attempts.break_off("a", "the worker is being removed")


ENDS: list[Callable[[Router], None]] = [
    client_leaves,
    server_ends,
    engine_breaks_off,
    worker_is_recalled,
    attempts_are_ended,
]


@pytest.mark.parametrize("plane", list(DataPlane), ids=str)
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__)
async def test_two_ends_at_once_are_one(
    plane: DataPlane,
    phase: Callable[..., contextlib.AbstractAsyncContextManager[None]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "router.proxy.request_log")
    for first, second in permutations(ENDS, 2):
        caplog.clear()
        async with routed(plane=plane) as (router, (engine,)):
            async with RawClient(router) as client:
                async with phase(router, engine, client):
                    first(router)
                    second(router)
                answering = asyncio.create_task(answer_all(engine))
                if not {first, second} & {client_leaves, server_ends}:
                    client.writer.write(BODY[-1:] if phase is in_its_body else b"")
                    await until(lambda: client.reader._buffer.endswith(b"0\r\n\r\n"))  # type: ignore[attr-defined]
            await until(lambda: not router.tasks)
            answering.cancel()
            await router.settled()
            names = first.__name__, second.__name__
            assert sum(router.outcomes.values()) == (phase is not in_its_body or ends_itself(names))
            assert len(caplog.records) == 1, names


def ends_itself(names: tuple[str, str]) -> bool:
    """Neither of them ends a request that is not with a worker yet."""
    return not {"client_leaves", "server_ends"} & {*names}


async def answer_all(engine: ScriptedServer) -> None:
    """What is made again."""
    while True:
        await (await engine.next()).stream(*TOKENS, DONE)
