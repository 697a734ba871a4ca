"""The stack of processes that ``make up-envoy`` starts, and the command ``evenstep pick``."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.support.envoy import program
from tests.support.server import free_port

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60.0


@pytest.mark.parametrize("flags", [(), ("--ext-proc",)], ids=["ext_authz", "ext_proc"])
def test_all_is_started_answers_and_ends(tmp_path: Path, flags: tuple[str, ...]) -> None:
    program()
    process = subprocess.Popen(
        [sys.executable, "-m", "deploy.envoy.up", "--workers", "2", *flags],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout
    said: list[str] = []
    try:
        for line in process.stdout:
            said.append(line)
            if line.startswith("Ctrl-C"):
                break
        else:
            raise AssertionError("".join(said))
        urls = dict(re.findall(r"^(\w+) +(\S+)", "".join(said), re.MULTILINE))
        body = {"model": "emulated", "prompt": [1, 2, 3], "max_tokens": 5}
        answer = httpx.post(f"{urls['envoy']}/v1/completions", json=body, timeout=WAIT_S)
        assert answer.json()["usage"]["completion_tokens"] == 5
        assert "evenstep_picks" in httpx.get(f"{urls['picker']}/metrics", timeout=WAIT_S).text
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0
    finally:
        process.terminate()
        process.wait(WAIT_S)
        process.stdout.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--worker", "http://engine.example:8001"), "gateways are told an IP address"),
        (
            ("--worker", "http://127.0.0.1:8001", "--data-plane", "asgi"),
            "needs --data-plane splice",
        ),
    ],
)
def test_what_it_cannot_do_is_said(flags: tuple[str, ...], said: str) -> None:
    port = str(free_port())
    started = [sys.executable, "-m", "router.cli", "pick", "--port", port, *flags]
    done = subprocess.run(started, capture_output=True, text=True, timeout=WAIT_S, check=False)

    assert done.returncode == 2
    assert said in done.stderr


def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        flags = ("--grpc-port", str(taken.getsockname()[1]), "--worker", "http://127.0.0.1:8001")
        started = [sys.executable, "-m", "router.cli", "pick", "--port", str(free_port()), *flags]
        done = subprocess.run(started, capture_output=True, text=True, timeout=WAIT_S, check=False)

    assert done.returncode == 2
    assert "cannot listen" in done.stderr
    assert "--grpc-port" in done.stderr
