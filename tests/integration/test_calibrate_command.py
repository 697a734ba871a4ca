"""evenstep calibrate before a server that says what a router might."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner, Result

from router.cli import app

Ask = Callable[..., Result]


@pytest.fixture
def ask() -> Iterator[Ask]:
    """Runs the command on a text that stands for /metrics."""
    said = {"text": ""}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(said["text"].encode())

        def log_message(self, *_: object) -> None:
            """Nothing."""

    def run(text: str, *arguments: str) -> Result:
        said["text"] = text
        url = f"http://127.0.0.1:{server.server_port}/"
        return CliRunner().invoke(app, ["calibrate", "--url", url, *arguments])

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield run
        server.shutdown()
        thread.join()


def told(group: str, idle_s: float = 9.0, watts: tuple[int, ...] = (97, 212, 403)) -> str:
    states = ("idle", "waiting", "computing")
    seconds = dict(zip((*states, "unknown"), (idle_s, 2.0, 3.0, 4.0), strict=True))
    lines = [
        f'evenstep_metered_seconds_total{{group="{group}",state="{state}"}} {value}'
        for state, value in seconds.items()
    ]
    lines += [
        f'evenstep_fitted_power_watts{{group="{group}",state="{state}"}} {value}'
        for state, value in zip(states, watts, strict=False)
    ]
    return "\n".join(lines) + "\n"


def test_levels_as_they_are_given_to_a_router(ask: Ask) -> None:
    assert ask(told("g")).stdout == "--power-levels 97,212,403\n"
    report = json.loads(ask(told("g"), "--json", "-").stdout)
    assert report["power_levels_w"] == [97, 212, 403]
    assert report["seconds"] == {"idle": 9, "waiting": 2, "computing": 3, "unknown": 4}


def test_one_of_several_groups(ask: Ask) -> None:
    both = told("g") + told("h", watts=(1, 2, 3))
    assert ask(both, "--group", "h").stdout == "--power-levels 1,2,3\n"
    for arguments in ((), ("--group", "i")):
        refused = ask(both, *arguments)
        assert (refused.exit_code, "there is g, h" in str(refused.exception)) == (1, True)


def test_what_is_no_url_is_said() -> None:
    refused = CliRunner().invoke(app, ["calibrate", "--url", "router:8000"])
    assert "write http://HOST:PORT" in str(refused.exception)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "no worker has a meter yet"),
        (told("g", idle_s=0.4), "have been idle for 0.4 s of the 0.5 s that it takes; let the"),
        (told("g", watts=()), "cannot be separated yet"),
        (told("g", watts=(300, 212, 403)), "does not give three levels"),
        ("<!doctype html>\n<p>Hello</p>\n", "give the router's URL"),
    ],
)
def test_what_tells_no_levels_is_said(ask: Ask, text: str, wrong: str) -> None:
    refused = ask(text)
    assert refused.exit_code
    assert wrong in str(refused.exception)
