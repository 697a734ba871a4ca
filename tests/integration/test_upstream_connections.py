"""Connections to an engine: which are kept, which are dialled again, which are closed."""

import asyncio
import socket

import pytest

from router.core.errors import NoWorkerError, UpstreamError
from router.engines.http_client import HttpClient
from tests.support.peers import CHUNKED, KIND, OK, Peers
from tests.support.scripted import head, soon, until


@pytest.mark.parametrize("answer", [OK + b"hi", CHUNKED + b"2\r\nhi\r\n0\r\n\r\n"])
async def test_connections_are_kept(peers: Peers, answer: bytes) -> None:
    for _ in range(3):
        assert await peers.whole(answer) == (200, b"hi")

    assert peers.server.connections == 1


@pytest.mark.parametrize(
    "answer",
    [
        head(200, KIND, content_length="2", connection="close") + b"hi",
        OK.replace(b"HTTP/1.1", b"HTTP/1.0") + b"hi",
    ],
)
async def test_connections_that_end_with_the_answer_are_not_kept(
    peers: Peers, answer: bytes
) -> None:
    for _ in range(2):
        assert await peers.whole(answer) == (200, b"hi")

    assert peers.server.connections == 2


async def test_requests_at_once_have_a_connection_each(peers: Peers) -> None:
    for _ in range(2):
        asked = [peers.ask(), peers.ask()]
        for exchange in [await peers.server.next(), await peers.server.next()]:
            await exchange.answer(exchange.body)
        for response in asked:
            await soon((await soon(response)).read())

    assert peers.server.connections == 2


async def test_a_kept_connection_that_was_closed_meanwhile_is_not_used(peers: Peers) -> None:
    asked = peers.ask()
    exchange = await peers.server.next()
    await exchange.send(OK, b"hi")
    await soon((await soon(asked)).read())
    exchange.close()
    await until(lambda: not peers.client._origins[peers.server.url].idle)

    assert await peers.whole(OK, b"hi") == (200, b"hi")
    assert peers.server.connections == 2


async def test_a_connection_that_its_engine_may_be_closing_is_not_used(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = peers.ask()
    exchange = await peers.server.next()
    await exchange.send(OK, b"hi")
    await soon((await soon(asked)).read())
    loop = asyncio.get_running_loop()
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + 4.5)

    assert await peers.whole(OK, b"hi") == (200, b"hi")
    await exchange.left()
    assert peers.server.connections == 2


@pytest.mark.parametrize("cut", ["close", "reset"])
async def test_what_was_read_on_a_kept_connection_is_not_sent_again(peers: Peers, cut: str) -> None:
    await peers.whole(OK, b"hi")
    asked = peers.ask(b"again")
    read = await peers.server.next()
    assert (read.connection, read.body) == (1, b"again")
    getattr(read, cut)()

    with pytest.raises(UpstreamError, match="before its answer was complete"):
        await soon(asked)
    assert peers.server.connections == 1


async def test_what_was_sent_on_a_connection_that_is_just_being_closed_is_sent_on_another() -> None:
    """The engine has closed it, which the router's event loop has not heard of yet."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)
        client = HttpClient()

        async def ask() -> bytes:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            return await (await client.request("POST", url, "/", (), b"?")).read()

        def answer(engine: socket.socket) -> None:
            assert engine.recv(65_536).endswith(b"?")
            engine.sendall(OK + b"hi")

        first = asyncio.create_task(ask())
        kept, _ = await asyncio.to_thread(listener.accept)
        await asyncio.to_thread(answer, kept)
        assert await soon(first) == b"hi"

        kept.close()
        second = asyncio.create_task(ask())
        fresh, _ = await asyncio.to_thread(listener.accept)
        with fresh:
            await asyncio.to_thread(answer, fresh)
            assert await soon(second) == b"hi"
        await client.aclose()


async def test_after_a_byte_nothing_is_sent_again(peers: Peers) -> None:
    await peers.whole(OK, b"hi")
    asked = peers.ask()
    exchange = await peers.server.next()
    await exchange.send(b"H")
    exchange.close()

    with pytest.raises(UpstreamError, match="before its answer was complete"):
        await soon(asked)
    assert peers.server.connections == 1


async def test_a_new_connection_is_not_redialled(peers: Peers) -> None:
    asked = peers.ask()
    (await peers.server.next()).close()

    with pytest.raises(UpstreamError, match="before its answer was complete"):
        await soon(asked)
    assert peers.server.connections == 1


async def test_unasked_bytes_end_an_idle_connection(peers: Peers) -> None:
    asked = peers.ask()
    exchange = await peers.server.next()
    await exchange.send(OK, b"hi")
    await soon((await soon(asked)).read())

    await exchange.send(OK, b"no")
    await exchange.left()

    assert await peers.whole(OK, b"hi") == (200, b"hi")
    assert peers.server.connections == 2


async def test_a_second_answer_behind_the_first_is_not_read(peers: Peers) -> None:
    response = await peers.converse(
        OK, b"hi", head(500, KIND, x_evil="1", content_length="2"), b"no"
    )

    assert (response.status, await soon(response.read())) == (200, b"hi")
    assert (b"x-evil", b"1") not in response.headers
    assert await peers.whole(OK, b"hi") == (200, b"hi")
    assert peers.server.connections == 2


async def test_idle_connections_are_closed_at_the_end(peers: Peers) -> None:
    asked = peers.ask()
    exchange = await peers.server.next()
    await exchange.send(OK, b"hi")
    await soon((await soon(asked)).read())

    await peers.client.aclose()

    await exchange.left()


async def test_one_that_answers_before_it_has_read_the_whole_body_is_not_kept() -> None:
    accepted = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal accepted
        accepted += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head(413, "text/plain", content_length="3") + b"big")
        await writer.drain()
        await left.wait()
        writer.close()

    left = asyncio.Event()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    client = HttpClient()
    for _ in range(2):
        response = await soon(client.request("POST", url, "/", body=bytes(64 * 1024 * 1024)))
        assert (response.status, await soon(response.read())) == (413, b"big")
        response.close()
    assert accepted == 2
    left.set()
    server.close()
    await client.aclose()


async def test_a_check_comes_after_the_connection_and_before_the_request(peers: Peers) -> None:
    called: list[int] = []

    def check() -> None:
        called.append(1)
        if len(called) == 2:
            raise NoWorkerError("another replica decides")

    with pytest.raises(NoWorkerError):
        await peers.client.request("POST", peers.server.url, "/", body=b"lost", check=check)
    assert await peers.whole(OK, b"hi") == (200, b"hi")
    assert peers.server.idle
    assert len(called) == 2
