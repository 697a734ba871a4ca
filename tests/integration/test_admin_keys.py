"""An admin port with keys over a real socket: headers, the login and its cookie; in a browser."""

import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI, Request

from router.access.key_files import KeySource
from router.admin.admin_guard import asked_by
from router.admin.admin_port import AddRoutes, create_admin, serving
from router.admin.login import SESSION_S, Sessions
from router.admin.status_page import Streams, add_page
from router.http.listening import listen, url
from tests.support.browser import Page
from tests.support.chromium import press, program, tab
from tests.support.server import Server, free_port, running, wait_until

OPERA, OTHER = "sk-opera-0123456789", "sk-other-0123456789"
KEYS = f"opera {OPERA}\nother {OTHER}\n"


@dataclass
class Admin:
    """An admin port that two keys open; ``asked_by`` says who asked."""

    http: httpx.AsyncClient
    keys: KeySource
    file: Path
    asked_by: list[str] = field(default_factory=list)

    def add_routes(self, app: FastAPI) -> None:
        @app.post("/change")
        async def change(request: Request) -> None:
            self.asked_by.append(asked_by(request))

    async def log_in(self, key: str = OPERA, **headers: str) -> httpx.Response:
        return await self.http.post("/login", data={"key": key}, headers=headers)

    async def change(self, **headers: str) -> int:
        return (await self.http.post("/change", headers=headers)).status_code


@pytest.fixture
async def admin(tmp_path: Path) -> AsyncIterator[Admin]:
    file = tmp_path / "keys"
    file.write_text(KEYS)
    with listen("127.0.0.1", 0, "--admin-port") as listener:
        async with httpx.AsyncClient(base_url=url(listener), timeout=60) as http:
            admin, streams = Admin(http, KeySource(str(file)), file), Streams()
            page = partial(add_page, render=lambda: b"state", streams=streams)
            routes: list[AddRoutes] = [page, admin.add_routes]
            async with serving(create_admin(routes, admin.keys), streams, listener):
                yield admin


@pytest.mark.parametrize("path", ["/events", "/nothing", "/openapi.json", "/change"])
@pytest.mark.parametrize("key", [None, "wrong", OPERA[:-1]])
async def test_without_a_key_nothing_is_told(admin: Admin, path: str, key: str | None) -> None:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    for method in ("GET", "POST"):
        answer = await admin.http.request(method, path, headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["type"] == "AuthenticationError"
    assert admin.asked_by == []


async def test_a_key_in_the_header_opens_it_under_any_host_name(admin: Admin) -> None:
    headers = {"authorization": f"Bearer {OTHER}", "host": "router.example"}
    assert (await admin.http.get("/", headers=headers)).status_code == 200
    assert await admin.change(**headers) == 200
    assert admin.asked_by == ["other, 127.0.0.1"]


async def test_who_logs_in_sees_the_page(admin: Admin) -> None:
    form = await admin.http.get("/")
    assert form.status_code == 401
    assert 'action="/login"' in form.text
    assert form.headers["cache-control"] == "no-store"
    assert "form-action 'self'; frame-ancestors 'none'" in form.headers["content-security-policy"]
    assert (await admin.http.get("/web/page.css")).status_code == 200

    wrong = await admin.log_in("wrong")
    assert wrong.status_code == 401
    assert "not known here" in wrong.text
    assert not admin.http.cookies

    done = await admin.log_in()
    assert (done.status_code, done.headers["location"]) == (303, "/")
    cookie = done.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert OPERA not in cookie
    assert "Load of each worker" in (await admin.http.get("/")).text


async def test_a_cookie_changes_something_from_this_origins_pages_only(admin: Admin) -> None:
    await admin.log_in()
    own = str(admin.http.base_url).rstrip("/")
    assert await admin.change(origin=own) == 200
    assert await admin.change() == 200, "a program that sends the cookie"
    for origin in ("http://evil.example", "null", f"{own}0"):
        assert await admin.change(origin=origin) == 401
        assert (await admin.log_in(origin=origin)).status_code == 401
    assert admin.asked_by == ["opera, 127.0.0.1"] * 2


async def test_a_session_ends_with_its_key(admin: Admin) -> None:
    await admin.log_in()
    admin.file.write_text(KEYS.replace(OPERA, OPERA + "-new"))
    admin.keys.ring = admin.keys.read(str(admin.file))
    assert await admin.change() == 401


@pytest.mark.parametrize("size", [5_000, 50_000])
async def test_a_form_that_is_too_long_or_has_no_key(admin: Admin, size: int) -> None:
    assert (await admin.http.post("/login", content=b"key=" + b"a" * size)).status_code == 401
    assert (await admin.http.post("/login", content=b"\xff\x00&&")).status_code == 401


def test_cookies_run_out_and_cannot_be_made_up(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(KEYS)
    keys, now_s = KeySource(str(tmp_path / "keys")), [0.0]
    sessions = Sessions(keys, lambda: now_s[0])
    opera, other = keys.ring.by_name.values()
    cookie = sessions.begin(opera)
    until_s, signature, _ = cookie.split(".")
    assert sessions.find(cookie) is opera
    made_up = ("", "..", f"{until_s}.{signature}.{other.name}", f"9{cookie}", f"{cookie}x", "é.é.é")
    for wrong in (*made_up, f"{until_s}.é.opera", f"é.{signature}.opera"):
        assert sessions.find(wrong) is None
    assert Sessions(keys, lambda: 0.0).find(cookie) is None, "another process made it"
    now_s[0] = SESSION_S
    assert sessions.find(cookie) is None


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Server]:
    """``evenstep serve`` before nothing, its admin port on all addresses; yields that port."""
    program()
    (tmp_path / "keys").write_text(KEYS)
    port, admin_port = free_port(), free_port()
    command = [sys.executable, "-m", "router.cli", "serve", "--port", str(port)]
    command += ["--worker", "http://127.0.0.1:1", "--policy", "jsq"]
    command += ["--admin-port", str(admin_port), "--admin-host", "0.0.0.0"]
    command += ["--admin-key-file", str(tmp_path / "keys")]
    with running(command, port, tmp_path / "log", ready_s=120, ready="/version") as server:
        yield Server(admin_port, server.process, server.log)


def test_an_operator_logs_in_and_out_of_use_goes_the_page_with_the_key(
    router: Server, tmp_path: Path
) -> None:
    for page in tab():
        page.call("Log.enable")
        page.open(f"{router.url}/")
        _log_in(page, "wrong")
        page.wait_for("document.querySelector('[role=alert]')?.textContent.includes('not known')")
        _log_in(page, OPERA)
        page.wait_for("document.getElementById('status')?.dataset.state === 'live'")
        assert page.evaluate("document.cookie") == "", "no script can read it"

        (tmp_path / "keys").write_text(f"other {OTHER}\n")
        router.process.send_signal(1)
        wait_until(lambda: "settings read again" in router.log_tail(), 60, "keys are read again")
        page.evaluate("location.reload()")
        page.wait_for("document.getElementById('key') !== null")
        _log_in(page, OTHER)
        page.wait_for("document.getElementById('status')?.dataset.state === 'live'")
        told = [each["entry"]["text"] for each in page.heard("Log.entryAdded")]
        assert not [text for text in told if "Content Security" in text]


def _log_in(page: Page, key: str) -> None:
    """Type a key, as a user does, and send the form."""
    page.wait_for("document.activeElement?.id === 'key'")
    for letter in key:
        press(page, letter, text=letter)
    press(page, "Enter", text="\r")
    page.wait_for("document.getElementById('key')?.value !== " + repr(key))
