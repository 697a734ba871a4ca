"""The parent of a router's processes, where the operating system refuses it one."""

import asyncio
import errno
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from router.processes.supervisor import Plan, Supervisor
from tests.support.scripted import until

# Says that it serves; ends with its parent, or at once if it is told to.
_PROCESS = """
import os, socket, sys
teller = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
teller.connect(os.environ["NOTIFY_SOCKET"])
teller.send(b"READY=1")
sys.stdin.read(int(sys.argv[1]))
"""


async def test_a_process_that_cannot_be_started_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[asyncio.subprocess.Process] = []
    refusals = [BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))]
    start = asyncio.create_subprocess_exec

    async def scarce(*command: str, **settings: Any) -> asyncio.subprocess.Process:
        if len(started) == 2 and refusals:
            raise refusals.pop()
        started.append(await start(sys.executable, "-c", _PROCESS, "1", **settings))
        return started[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", scarce)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        plan = Plan([os.dup(listener.fileno())], None, False, "info", "text")
    parent = Supervisor(plan, (), str(tmp_path))
    running = asyncio.create_task(parent.run())
    await until(lambda: running.done() or parent._served)
    started[1].kill()
    await until(lambda: running.done() or len(started) == 3)
    assert not running.done()
    assert not refusals
    os.kill(os.getpid(), signal.SIGTERM)
    await running
