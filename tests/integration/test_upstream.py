"""The engines' client over real sockets: framing, keep-alive, and everything that breaks."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import pytest

from router.engines.upstream import Headers, HttpClient, Response
from router.errors import UpstreamError
from tests.support.scripted import TIMEOUT_S, ScriptedServer, head, scripted, soon, until
from tests.support.server import free_port

KIND = "application/json"
OK = head(200, KIND, content_length="2")
CHUNKED = head(200, KIND, transfer_encoding="chunked")


class Peers:
    """A client and the server that it speaks to."""

    def __init__(self, client: HttpClient, server: ScriptedServer) -> None:
        self.client = client
        self.server = server

    def ask(self, body: bytes = b"?", headers: Headers = ()) -> asyncio.Task[Response]:
        return asyncio.create_task(
            self.client.request("POST", self.server.url, "/v1/completions", headers, body)
        )

    async def converse(self, *answer: bytes) -> Response:
        """The head of an answer that is sent in these parts, the connection staying open."""
        asked = self.ask()
        exchange = await self.server.next()
        await exchange.send(*answer)
        exchange.ended.set()
        return await soon(asked)

    async def whole(self, *answer: bytes) -> tuple[int, bytes]:
        response = await self.converse(*answer)
        return response.status, await soon(response.read())


@pytest.fixture
async def peers() -> AsyncIterator[Peers]:
    async with scripted() as servers:
        client = HttpClient(connect_timeout_s=TIMEOUT_S)
        yield Peers(client, servers[0])
        await client.aclose()


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


# connections


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
    await until(lambda: not peers.client._idle[peers.server.url])

    assert await peers.whole(OK, b"hi") == (200, b"hi")
    assert peers.server.connections == 2


@pytest.mark.parametrize("cut", ["close", "reset"])
async def test_a_kept_connection_that_is_just_being_closed_is_redialled(
    peers: Peers, cut: str
) -> None:
    await peers.whole(OK, b"hi")
    asked = peers.ask(b"again")
    stale = await peers.server.next()
    getattr(stale, cut)()

    exchange = await peers.server.next()

    assert (stale.connection, exchange.connection) == (1, 2)
    assert exchange.body == stale.body == b"again"
    await exchange.answer(b"ok")
    assert await soon((await soon(asked)).read()) == b"ok"


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


# what breaks


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
    assert not peers.client._idle[peers.server.url]


async def test_cancelling_before_the_head_ends_the_request_at_the_engine(peers: Peers) -> None:
    asked = peers.ask()
    exchange = await peers.server.next()

    asked.cancel()

    await exchange.left()
    with pytest.raises(asyncio.CancelledError):
        await asked


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
