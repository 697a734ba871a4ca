"""The admin port over a real socket: who may ask, and streams that end."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial

import httpx
import pytest
from fastapi import FastAPI
from starlette.responses import Response

from router.admin.admin_port import AddRoutes, create_admin, serving
from router.admin.status_page import WEB, Streams, Ticker, add_page, streamed
from router.api.shared_routes import add_instance, add_metrics
from router.http.listening import listen, url
from tests.support.scripted import soon, until

STATE = b"data: state\n\n"


@dataclass
class Admin:
    """An admin port; ``renders`` counts the states that were read."""

    url: str
    http: httpx.AsyncClient
    streams: Streams
    renders: int = 0
    broken: bool = False
    padding: int = 0

    def render(self) -> bytes:
        self.renders += 1
        if self.broken:
            raise ValueError("no state")
        return b"%d" % self.renders + b" " * self.padding


async def _metrics() -> bytes:
    return b"metric 1\n"


@contextlib.asynccontextmanager
async def admin_port(
    limit: int = 64, interval_s: float = 0.01, add: Callable[[FastAPI], None] = lambda _: None
) -> AsyncIterator[Admin]:
    with listen("127.0.0.1", 0, "--admin-port") as listener:
        async with httpx.AsyncClient(base_url=url(listener), timeout=60) as http:
            admin = Admin(url(listener), http, Streams(limit))
            routes: list[AddRoutes] = [
                partial(add_metrics, render=_metrics),
                partial(add_instance, deciders={}),
                partial(
                    add_page, render=admin.render, streams=admin.streams, interval_s=interval_s
                ),
                add,
            ]
            async with serving(create_admin(routes), admin.streams, listener):
                yield admin


@pytest.mark.parametrize(
    "host", ["localhost:1", "127.0.0.1", "127.8.8.8:80", "[::1]:9", "LOCALHOST"]
)
async def test_it_answers_to_names_of_this_machine(host: str) -> None:
    async with admin_port() as admin:
        answer = await admin.http.get("/metrics", headers={"host": host})

    assert (answer.status_code, answer.text) == (200, "metric 1\n")


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "10.0.0.1", ""])
async def test_another_name_is_refused(host: str) -> None:
    async with admin_port() as admin:
        answer = await admin.http.get("/", headers={"host": host})

    assert answer.status_code == 403
    assert "localhost and 127.0.0.1 only" in answer.json()["error"]["message"]


async def test_two_names_are_none() -> None:
    async with admin_port() as admin:
        reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(admin.url).port)
        writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 400")
        writer.close()


async def test_the_page_and_its_files_load_nothing_foreign() -> None:
    async with admin_port() as admin:
        page = await admin.http.get("/")
        module = await admin.http.get("/web/main.js")

    assert page.text == (WEB / "index.html").read_text()
    assert module.headers["content-type"].startswith("text/javascript")
    for answer in (page, module):
        assert answer.headers["content-security-policy"].startswith("default-src 'none'; script-")
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-cache"


async def test_errors_are_in_openais_form() -> None:
    async with admin_port() as admin:
        answer = await admin.http.get("/debug/instance", params={"group": "g"})

    assert answer.status_code == 404
    assert "group 'g'" in answer.json()["error"]["message"]


async def test_what_nobody_expected_is_said_in_the_same_form() -> None:
    def add(app: FastAPI) -> None:
        app.get("/fails")(lambda: 1 // 0)

    async with admin_port(add=add) as admin:
        answer = await admin.http.get("/fails")

    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "internal error")


async def test_viewers_share_the_states_and_without_any_none_is_read() -> None:
    async with admin_port() as admin:
        async with events(admin) as one, events(admin) as other:
            state = await anext(other)
            # Who was there first has been sent earlier ones, however many.
            while (earlier := await anext(one)) != state:
                assert int(earlier.removeprefix("data: ")) < int(state.removeprefix("data: "))
        await until(lambda: not admin.streams._open)
        before = admin.renders
        async with events(admin) as late:
            assert int((await anext(late)).removeprefix("data: ")) <= before + 2


async def test_a_state_that_cannot_be_read_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    async with admin_port() as admin, events(admin) as lines:
        admin.broken = True
        async for line in lines:
            if line == ": still here":
                break
        admin.broken = False
        async for line in lines:
            if line.startswith("data: "):
                break

    assert "could not be read" in caplog.text


async def test_a_viewer_that_does_not_read_is_dropped() -> None:
    streams = Streams()
    viewer = Ticker(lambda: b"state", streams, 0.001).watch()
    await until(lambda: not viewer.open)

    assert not streams._open
    assert [chunk async for chunk in viewer.chunks()] == [b"retry: 1000\n\n", *[STATE] * 4]


async def test_a_connection_that_is_not_read_holds_a_few_states_at_most() -> None:
    async with admin_port() as admin:
        admin.padding = 1 << 20
        reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(admin.url).port)
        writer.write(b"GET /events HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await until(lambda: admin.renders > 0)
        await until(lambda: not admin.streams._open)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_no_more_streams_than_the_limit() -> None:
    async with admin_port(limit=1) as admin, events(admin):
        answer = await admin.http.get("/events")

    assert answer.status_code == 503
    assert "1 streams are open already" in answer.json()["error"]["message"]


async def test_the_end_of_the_server_is_the_end_of_its_streams() -> None:
    def add(app: FastAPI) -> None:
        @app.get("/silent")
        async def silent() -> Response:
            return streamed(streams[0].open(1), "text/plain")

    streams: list[Streams] = []
    async with contextlib.AsyncExitStack() as stack:
        async with admin_port(add=add) as admin:
            streams.append(admin.streams)
            lines = await stack.enter_async_context(events(admin))
            silent = asyncio.create_task(_read_all(admin.url + "/silent"))
            await until(lambda: len(admin.streams._open) == 2)
        await soon(_drain(lines))
        assert await soon(silent) == b""


@contextlib.asynccontextmanager
async def events(admin: Admin) -> AsyncIterator[AsyncIterator[str]]:
    """Lines of ``GET /events``, without the empty ones, once it has begun."""
    # A client of its own: the server's end must not find it closed already.
    async with (
        httpx.AsyncClient(base_url=admin.url, timeout=60) as http,
        http.stream("GET", "/events") as answer,
    ):
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = aiter(answer.aiter_lines())
        assert await anext(lines) == "retry: 1000"
        yield (line async for line in lines if line)


async def _read_all(address: str) -> bytes:
    async with httpx.AsyncClient(timeout=60) as http:
        return (await http.get(address)).content


async def _drain(lines: AsyncIterator[str]) -> None:
    async for _ in lines:
        pass
