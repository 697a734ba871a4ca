"""Clients that take their time: others are served meanwhile, and the slow ones are ended."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from router.core.types import Outcome
from router.http.port import HttpLimits
from tests.support.raw_http import (
    HOST,
    LAST,
    LINE,
    VALID,
    Front,
    connect,
    connections_of,
    exchange,
    fronted,
    message,
    read_all,
    replies_in,
)
from tests.support.relaying import routed
from tests.support.scripted import Exchange, soon, until
from tests.support.server import wait_until
from tests.support.serving import Router

HELD = 200

# What is sent at once, what byte by byte again and again, and the status in the end.
SLOW: dict[str, tuple[bytes, bytes, list[int]]] = {
    "sends nothing": (b"", b"", []),
    "drips empty lines": (b"", b"\r\n", []),
    "drips its request line": (b"POST /", b"a", [408]),
    "drips header fields": (LINE + b"\r\n", b"X-A: b\r\n", [408]),
    "drips a body": (message(HOST, b"Content-Length: 60000"), b" ", [408]),
    "drips chunks": (message(HOST, b"Transfer-Encoding: chunked"), b"1\r\n \r\n", [408]),
    "drips behind its body": (
        message(HOST, b"Transfer-Encoding: chunked", body=b"0\r\n"),
        b"X-A: b\r\n",
        [408],
    ),
    # It has begun at once: a connection that is idle for too long is closed without a word.
    "drips its second request": (
        VALID + b"G",
        b"ET /v1/models HTTP/1.1\r\nX:" + b"a" * 200,
        [200, 408],
    ),
}


class Dripping:
    """Slow clients of all kinds, until the block ends."""

    def __init__(self, port: int, count: int) -> None:
        self.kinds = [list(SLOW)[n % len(SLOW)] for n in range(count)]
        self.sockets: list[socket.socket] = []
        for kind in self.kinds:
            sock = connect(port)
            sock.sendall(SLOW[kind][0])
            self.sockets.append(sock)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._drip)

    def __enter__(self) -> Dripping:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        for sock in self.sockets:
            sock.close()

    def _drip(self) -> None:
        turn = 0
        while not self._stopped.wait(0.05):
            for kind, sock in zip(self.kinds, self.sockets, strict=True):
                drops = SLOW[kind][1]
                # Who goes on after the answer may lose it: what comes too late resets a connection.
                if drops and not _over(sock):
                    at = turn % len(drops)
                    with contextlib.suppress(OSError):  # it has been ended
                        sock.send(drops[at : at + 1])
            turn += 1

    def ended(self) -> int:
        """How many have been answered 408, or closed."""
        return len([sock for sock in self.sockets if _over(sock)])

    def statuses(self) -> Iterator[tuple[str, list[int]]]:
        """Each one's kind, and what it was answered until its end."""
        for kind, sock in zip(self.kinds, self.sockets, strict=True):
            yield kind, [reply.status for reply in replies_in(read_all(sock))]


def _over(sock: socket.socket) -> bool:
    if not select.select([sock], [], [], 0)[0]:
        return False
    try:
        seen = sock.recv(65_536, socket.MSG_PEEK)
    except ConnectionResetError:  # it was closed in the moment when a drop came, which is unread
        return True
    return not seen or b"HTTP/1.1 408" in seen


def test_others_are_served_while_two_hundred_are_held(tmp_path: Path) -> None:
    limits = ("--header-timeout", "600", "--body-timeout", "600", "--keep-alive-timeout", "600")
    with fronted(tmp_path, *limits) as front:
        with Dripping(front.port, HELD) as slow, ThreadPoolExecutor(10) as clients:
            received = list(clients.map(lambda _: exchange(front.port, LAST), range(50)))
            assert [replies_in(each)[0].status for each in received] == [200] * 50
            assert slow.ended() == 0
            assert connections_of(front.router) >= HELD
        assert front.forwarded() == 50 + slow.kinds.count("drips its second request")


@pytest.fixture(scope="module")
def hasty(data_plane: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """A router that waits for a second at most, and for no more than 20 clients beside them."""
    limits = ("--header-timeout", "1", "--body-timeout", "1", "--keep-alive-timeout", "1")
    most = ("--max-connections", str(HELD + 20))
    with fronted(tmp_path_factory.mktemp("hasty"), *limits, *most) as front:
        yield front


def test_slow_clients_are_told_and_closed(hasty: Front) -> None:
    with Dripping(hasty.port, HELD) as slow:
        for kind, statuses in slow.statuses():
            assert statuses == SLOW[kind][2], kind
    assert hasty.forwarded() == slow.kinds.count("drips its second request")
    told = sum(408 in SLOW[kind][2] for kind in slow.kinds)
    assert (
        f'evenstep_http_refused_total{{status="408"}} {told}.0' in hasty.router.get("/metrics").text
    )
    wait_until(lambda: connections_of(hasty.router) == 0, 60, "no connection is left")


def test_an_idle_connection_is_closed(hasty: Front) -> None:
    (reply,) = replies_in(exchange(hasty.port, VALID))

    assert (reply.status, reply.headers.get("connection")) == (200, None)


def test_one_connection_too_many_is_told(tmp_path: Path) -> None:
    with fronted(tmp_path, "--max-connections", "20") as front, contextlib.ExitStack() as stack:
        wait_until(lambda: connections_of(front.router) == 0, 60, "no connection is open")
        first, *_ = [stack.enter_context(connect(front.port)) for _ in range(20)]
        wait_until(lambda: connections_of(front.router) == 20, 60, "all are accepted")
        for request in (LAST, b""):
            (reply,) = replies_in(exchange(front.port, request))
            assert (reply.status, reply.headers["retry-after"]) == (503, "1")
            assert reply.error["type"] == "ServiceUnavailableError"
        first.close()
        wait_until(lambda: connections_of(front.router) == 19, 60, "one has left")
        assert replies_in(exchange(front.port, LAST))[0].status == 200


READERS = 20
CLOSE = b"Connection: close"
CHUNK = b"data: " + b"x" * 65_528 + b"\n\n"


async def _pump(exchange: Exchange) -> int:
    """Stream until the router has gone; bytes that it has taken."""
    await exchange.start_stream()
    taken = 0
    with contextlib.suppress(ConnectionError):
        while True:
            await exchange.chunks(CHUNK)
            taken += len(CHUNK)
    return taken


async def _ask_and_never_read(router: Router) -> asyncio.StreamWriter:
    _, writer = await asyncio.open_connection("127.0.0.1", router.port, limit=1)
    # Beyond its limit the reader reads no more.
    writer.write(message(HOST, b"Content-Length: 17", body=b'{"prompt": [1,2]}'))
    await writer.drain()
    return writer


async def test_clients_that_never_read_are_bounded_and_ended() -> None:
    limits = HttpLimits(write_timeout_s=0.5)
    async with routed(slots=READERS + 1, limits=limits) as (router, (engine,)):
        writers = [await _ask_and_never_read(router) for _ in range(READERS)]
        streams = [asyncio.create_task(_pump(await engine.next())) for _ in writers]
        asked = router.post()
        await (await engine.next()).answer(b"{}")
        assert (await soon(asked)).status_code == 200

        taken = await soon(asyncio.gather(*streams))

        # The kernel's buffers on both sides of the router, and some hundred kB of its own.
        assert max(taken) < 32 << 20
        await router.settled()
        assert router.outcomes == {Outcome.ABORTED: READERS, Outcome.COMPLETED: 1}
        for writer in writers:
            writer.transport.abort()


async def test_a_client_that_reads_in_pieces_gets_all_of_its_answer() -> None:
    body = b"x" * (24 << 20)
    async with routed(limits=HttpLimits(write_timeout_s=600.0)) as (router, (engine,)):
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port, limit=1)
        writer.write(message(HOST, b"Content-Length: 17", CLOSE, body=b'{"prompt": [1,2]}'))
        await (await engine.next()).answer(body)
        received = 0
        while data := await soon(reader.read(1 << 20)):
            received += len(data)
        assert received > len(body)
        await until(lambda: router.outcomes == {Outcome.COMPLETED: 1})
        writer.transport.abort()
