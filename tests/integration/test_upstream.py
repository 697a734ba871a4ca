"""The engines' client over real sockets: what is sent, how answers are framed, back-pressure."""

import asyncio

import pytest

from router.core.errors import UpstreamError
from tests.support.peers import CHUNKED, KIND, OK, Peers
from tests.support.scripted import head, soon, until


async def test_a_request_is_sent_whole(peers: Peers) -> None:
    asked = peers.ask(b"{}", [(b"content-type", b"application/json"), (b"x-a", b"1")])
    exchange = await peers.server.next()

    assert (exchange.method, exchange.target, exchange.body) == ("POST", "/v1/completions", b"{}")
    assert exchange.headers == {
        "host": f"127.0.0.1:{peers.server.port}",
        "content-type": "application/json",
        "x-a": "1",
        "content-length": "2",
    }
    await exchange.answer(b"ok")
    assert await soon((await soon(asked)).read()) == b"ok"


async def test_the_base_url_may_have_a_path(peers: Peers) -> None:
    asked = asyncio.create_task(
        peers.client.request("GET", f"{peers.server.url}/engines/a/", "/v1/models?x=1")
    )
    exchange = await peers.server.next()

    assert (exchange.method, exchange.target) == ("GET", "/engines/a/v1/models?x=1")
    await exchange.answer(b"ok")
    (await soon(asked)).close()


async def test_status_and_headers(peers: Peers) -> None:
    response = await peers.converse(head(418, KIND, content_length="0", X_Thing="a b"))

    assert response.status == 418
    assert (b"X-Thing", b"a b") in response.headers
    assert await soon(response.read()) == b""


# framing


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (OK + b"hi", b"hi"),
        (CHUNKED + b"2\r\nhi\r\n0\r\n\r\n", b"hi"),
        (CHUNKED + b"1\r\nh\r\n1;ext=1\r\ni\r\n0\r\nX-Trailer: 1\r\n\r\n", b"hi"),
        (CHUNKED + b"0\r\n\r\n", b""),
        (head(200, KIND, content_length="0"), b""),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"hi", b"hi"),
        (b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" * 2 + OK + b"hi", b"hi"),
    ],
)
async def test_framing_however_the_bytes_come(peers: Peers, answer: bytes, body: bytes) -> None:
    assert (await peers.whole(answer))[1] == body
    for cut in range(1, len(answer)):
        asked = peers.ask()
        exchange = await peers.server.next()
        await exchange.send(answer[:cut])
        await asyncio.sleep(0)
        await exchange.send(answer[cut:])
        exchange.ended.set()
        assert await soon((await soon(asked)).read()) == body


async def test_headers_of_an_early_answer_and_trailers_are_left_out(peers: Peers) -> None:
    response = await peers.converse(
        head(103, KIND, X_Early="1") + CHUNKED + b"0\r\nX-Trailer: 1\r\n\r\n"
    )

    assert response.headers == [
        (b"content-type", KIND.encode()),
        (b"transfer-encoding", b"chunked"),
    ]
    response.close()


async def test_a_body_without_a_length_ends_with_the_connection(peers: Peers) -> None:
    asked = peers.ask()
    exchange = await peers.server.next()
    await exchange.send(head(200, KIND), b"some", b" bytes")
    exchange.close()

    assert await soon((await soon(asked)).read()) == b"some bytes"


async def test_a_body_without_a_length_may_break_off_too(peers: Peers) -> None:
    asked = peers.ask()
    exchange = await peers.server.next()
    await exchange.send(head(200, KIND), b"some")
    response = await soon(asked)
    assert await soon(anext(aiter(response))) == b"some"

    exchange.reset()

    with pytest.raises(UpstreamError):
        await soon(response.read())


async def test_bytes_are_handed_on_as_they_come(peers: Peers) -> None:
    asked = peers.ask()
    exchange = await peers.server.next()
    await exchange.start_stream()
    body = aiter(await soon(asked))

    for part in (b"a", b"bc", b"def"):
        await exchange.chunks(part)
        assert await soon(anext(body)) == part
    await exchange.end_stream()
    with pytest.raises(StopAsyncIteration):
        await soon(anext(body))


async def test_large_bodies_both_ways(peers: Peers) -> None:
    body = bytes(range(256)) * 32_000
    asked = peers.ask(body)
    exchange = await peers.server.next()
    assert exchange.body == body

    sending = asyncio.create_task(exchange.answer(body))

    assert await soon((await soon(asked)).read()) == body
    await soon(sending)


# back-pressure


async def test_a_slow_reader_slows_the_engine_down(peers: Peers) -> None:
    total = 32 << 20
    asked = peers.ask()
    exchange = await peers.server.next()
    exchange.writer.write(head(200, KIND, content_length=str(total)) + bytes(total))
    response = await soon(asked)
    assert response._connection is not None
    transport = response._connection._transport
    assert transport is not None

    await until(lambda: not transport.is_reading())
    unsent = exchange.writer.transport.get_write_buffer_size()
    sizes = [len(chunk) async for chunk in response]

    assert unsent > total // 2
    assert sum(sizes) == total
    assert max(sizes) <= 1 << 20


async def test_a_connection_that_was_slowed_down_can_be_used_again(peers: Peers) -> None:
    size = 256 * 1024 + 1
    response = await peers.converse(head(200, KIND, content_length=str(size)), bytes(size))
    connection = response._connection
    assert connection is not None
    await until(lambda: connection._done)

    assert len(await soon(response.read())) == size
    assert await peers.whole(OK, b"hi") == (200, b"hi")
    assert peers.server.connections == 1


async def test_a_connection_whose_answer_was_not_read_is_not_used_again(peers: Peers) -> None:
    size = 256 * 1024 + 1
    response = await peers.converse(head(200, KIND, content_length=str(size)), bytes(size))
    connection = response._connection
    assert connection is not None
    await until(lambda: connection._done)

    response.close()

    assert await peers.whole(OK, b"hi") == (200, b"hi")
    assert peers.server.connections == 2


async def test_an_answer_that_piled_up_is_poured_to_its_end(peers: Peers) -> None:
    size = 4 << 20
    asked = peers.ask()
    exchange = await peers.server.next()
    exchange.writer.write(head(200, KIND, content_length=str(size)) + bytes(size))
    response = await soon(asked)
    assert response._connection is not None
    transport = response._connection._transport
    assert transport is not None
    await until(lambda: not transport.is_reading())

    assert len(await soon(response.read())) == size
