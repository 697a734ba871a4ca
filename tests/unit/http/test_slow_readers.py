"""Clients that read slowly are waited for; those that do not read are cut off."""

import asyncio
from collections.abc import Callable

import pytest
from fastapi import FastAPI
from uvicorn import Config
from uvicorn.server import ServerState

from router.http.client_protocol import LimitedProtocol
from router.http.port import HttpLimits
from router.http.refusal import HttpCounts


class Socket:
    def fileno(self) -> int:
        return 3

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    getpeername = getsockname


class Transport(asyncio.Transport):
    """Holds what its client has not read."""

    def __init__(self) -> None:
        super().__init__({"socket": Socket(), "peername": ("127.0.0.1", 1)})
        self.unsent, self.aborted, self.closing = 0, False, False

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None:
        self.closing = True

    def is_closing(self) -> bool:
        return self.closing


@pytest.fixture
async def expire() -> tuple[Transport, LimitedProtocol, Callable[[], None]]:
    """A connection, and a call that lets its deadlines pass."""
    loop = asyncio.get_running_loop()
    config = Config(FastAPI(), loop="asyncio", log_config=None)
    protocol = LimitedProtocol(
        HttpLimits(write_timeout_s=30.0), HttpCounts(), None, config, ServerState(), {}, loop
    )
    transport = Transport()
    protocol.connection_made(transport)

    def pass_() -> None:
        for deadline in (protocol._writing, protocol._reading):
            if deadline._at_s is not None:
                deadline._at_s = 0.0
                deadline._fire()

    return transport, protocol, pass_


Connection = tuple[Transport, LimitedProtocol, Callable[[], None]]


async def test_a_client_that_reads_slowly_is_waited_for(expire: Connection) -> None:
    transport, protocol, pass_ = expire
    protocol._reading.set(None)
    transport.unsent = 1_000_000
    protocol.pause_writing()
    for left in (900_000, 899_999, 1):
        transport.unsent = left
        pass_()
        assert not transport.aborted
    pass_()
    assert transport.aborted


async def test_so_is_one_whose_last_answer_is_under_way(expire: Connection) -> None:
    transport, protocol, pass_ = expire
    transport.unsent = 1_000
    protocol._close()
    assert transport.closing
    transport.unsent = 500
    pass_()
    assert not transport.aborted
    pass_()
    assert transport.aborted
