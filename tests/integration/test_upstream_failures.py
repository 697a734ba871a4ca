"""What breaks between the router and an engine: refused, silent, cut off, not HTTP."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import pytest

from router.core.errors import UpstreamError
from router.engines.http_client import HttpClient
from tests.support.peers import CHUNKED, KIND, OK, Peers
from tests.support.scripted import head, soon, until
from tests.support.server import free_port


async def test_refused() -> None:
    with pytest.raises(UpstreamError, match="cannot connect to http://127"):
        await soon(HttpClient().request("GET", f"http://127.0.0.1:{free_port()}", "/"))


@contextlib.contextmanager
def deaf_port() -> Iterator[int]:
    """A port whose queue of connections is full: further ones get no answer."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(8):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


async def test_no_connection_in_time() -> None:
    with deaf_port() as port, pytest.raises(UpstreamError, match="no connection within"):
        await soon(HttpClient(0.05).request("GET", f"http://127.0.0.1:{port}", "/"))


async def test_a_machine_that_vanished_is_noticed(peers: Peers) -> None:
    response = await peers.converse(OK)
    assert response._connection is not None
    assert response._connection._transport is not None
    probed = response._connection._transport.get_extra_info("socket")

    assert probed.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    idle_s, interval_s, probes, unheard_ms = (
        probed.getsockopt(socket.IPPROTO_TCP, option)
        for option in (
            socket.TCP_KEEPIDLE,
            socket.TCP_KEEPINTVL,
            socket.TCP_KEEPCNT,
            socket.TCP_USER_TIMEOUT,
        )
    )
    assert idle_s + interval_s * probes == unheard_ms / 1000 == 25
    response.close()


@pytest.mark.parametrize("cut", ["close", "reset"])
@pytest.mark.parametrize(
    "part",
    [head(200, KIND, content_length="9") + b"hi", CHUNKED + b"2\r\nhi\r\n", CHUNKED + b"9\r\nhi"],
)
async def test_broken_off_in_the_body(peers: Peers, part: bytes, cut: str) -> None:
    asked = peers.ask()
    exchange = await peers.server.next()
    await exchange.send(part)
    response = await soon(asked)
    body = aiter(response)
    assert await soon(anext(body)) == b"hi"

    getattr(exchange, cut)()

    with pytest.raises(UpstreamError, match="before its answer was complete"):
        await soon(anext(body))
    response.close()


async def test_what_came_before_a_break_is_handed_on_first(peers: Peers) -> None:
    asked = peers.ask()
    exchange = await peers.server.next()
    await exchange.send(head(200, KIND, content_length="9"), b"hi")
    exchange.close()
    response = await soon(asked)
    assert response._connection is not None
    await until(lambda: response._connection is None or response._connection._error is not None)

    body = aiter(response)

    assert await soon(anext(body)) == b"hi"
    with pytest.raises(UpstreamError):
        await soon(anext(body))


@pytest.mark.parametrize(
    "garbage",
    [
        b"SSH-2.0-OpenSSH_9.9\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        OK.replace(b"\r\n", b"\n") + b"hi",
        head(200, KIND, content_length="two"),
        head(200, KIND, content_length="2", transfer_encoding="chunked") + b"2\r\nhi\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nhi!",
        b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nbytes",
    ],
)
async def test_garbage_instead_of_an_answer(peers: Peers, garbage: bytes) -> None:
    with pytest.raises(UpstreamError, match="is not HTTP"):
        await peers.whole(garbage)


async def test_garbage_in_the_body(peers: Peers) -> None:
    response = await peers.converse(CHUNKED, b"2\r\nhi\r\n", b"zz\r\n")
    assert response._connection is not None
    await until(lambda: response._connection is None or response._connection.closing)

    body = aiter(response)

    assert await soon(anext(body)) == b"hi"
    with pytest.raises(UpstreamError, match="is not HTTP"):
        await soon(anext(body))


async def test_closing_in_the_body_ends_the_request_at_the_engine(peers: Peers) -> None:
    asked = peers.ask()
    exchange = await peers.server.next()
    await exchange.start_stream()
    response = await soon(asked)

    response.close()
    response.close()

    await exchange.left()
    assert await soon(response.read()) == b""
    assert not peers.client._origins[peers.server.url].idle


async def test_cancelling_before_the_head_ends_the_request_at_the_engine(peers: Peers) -> None:
    asked = peers.ask()
    exchange = await peers.server.next()

    asked.cancel()

    await exchange.left()
    with pytest.raises(asyncio.CancelledError):
        await asked


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"HTTP/1.1 200 OK\r\n", b"x-a: b\r\n"),
        (b"HTTP/1.1 200 OK\r\nx-a: ", b"x"),
        (b"HTTP/1.1 200 OK\r\nx-a: " + b"x" * 80_000, b"\r\n\r\n"),
        (CHUNKED + b"1\r\nh\r\n0\r\nx-a: ", b"x"),
        (CHUNKED + b"1\r\nh\r\n1;a=", b"x"),
    ],
    ids=["fields", "a field", "an end at last", "trailers", "a chunk's extension"],
)
async def test_what_is_no_body_has_a_bound(peers: Peers, begin: bytes, piece: bytes) -> None:
    asked = peers.ask()
    exchange = await peers.server.next()

    async def whole() -> None:
        await (await asked).read()

    reading = asyncio.create_task(whole())
    with contextlib.suppress(ConnectionError):
        await exchange.send(begin)
        for _ in range(64):
            await exchange.send(piece * (65_536 // len(piece)))

    with pytest.raises(UpstreamError, match="65,536 bytes"):
        await soon(reading)


async def test_an_answer_without_a_length_that_was_broken_off_is_not_complete(
    peers: Peers,
) -> None:
    asked = peers.ask()
    exchange = await peers.server.next()
    await exchange.send(head(200, KIND), b"half")
    response = await soon(asked)

    response.break_off(UpstreamError("silent"))
    await exchange.left()

    with pytest.raises(UpstreamError, match="silent"):
        await soon(response.read())
