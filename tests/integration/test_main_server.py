"""The main port's server at its end: connections not accepted yet, clients that do not read."""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from typing import cast

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.api.front import Front
from router.http.listening import listen, server_config
from router.http.port import HttpLimits, Lifecycle
from router.proxy.request_log import RequestLog
from router.serve.main_server import MainServer
from tests.support.scripted import TIMEOUT_S, until

REQUEST = b"GET /answer HTTP/1.1\r\nhost: router\r\n\r\n"


@contextlib.asynccontextmanager
async def serving(
    app: ASGIApp, lifecycle: Lifecycle
) -> AsyncIterator[tuple[MainServer, socket.socket, asyncio.Task[None]]]:
    front = Front(app, lifecycle, RequestLog(time.monotonic), None)
    config = server_config(front, HttpLimits(), lifespan="off")
    with listen("127.0.0.1", 0, "--port") as listener:
        server = MainServer(config, lifecycle)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        await until(lambda: server.started)
        yield server, listener, task
        task.cancel()


async def quick(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("nothing new is served")


async def test_who_is_connected_when_the_port_closes_is_heard() -> None:
    async with serving(quick, Lifecycle(0.0, 30.0)) as (server, listener, _):
        with socket.create_connection(listener.getsockname()) as client:
            client.sendall(REQUEST)
            client.setblocking(False)
            # The event loop has had no turn yet in which to accept the connection.
            async with asyncio.timeout(TIMEOUT_S):
                await server.shutdown([listener])
            answer = client.recv(4096)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"the router is ending" in answer


async def test_who_does_not_read_is_not_waited_for() -> None:
    ended = asyncio.Event()

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
        finally:
            ended.set()

    async with serving(endless, Lifecycle(0.0, 0.1)) as (server, listener, task):
        with socket.create_connection(listener.getsockname()) as client:
            client.sendall(REQUEST)
            await until(lambda: any(one.flow.write_paused for one in connections(server)))
            os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(TIMEOUT_S):
                await task
            assert ended.is_set()
        await until(lambda: not connections(server))


def connections(server: MainServer) -> set[HttpToolsProtocol]:
    return cast(set[HttpToolsProtocol], server.server_state.connections)
