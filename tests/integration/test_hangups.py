"""SIGHUP waits for whoever takes it, whichever thread it reaches."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.server import free_port, starting, wait_until

_HELD = """
import asyncio, os, signal, threading

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would be ignored from the start
ending = threading.Event()
early = threading.Thread(target=ending.wait)  # as a library's own, before the signal is held
early.start()

from router import systemd

systemd.hold_hangups()
os.kill(os.getpid(), signal.SIGHUP)
ending.set()
early.join()  # it takes the signal before it goes on; if it did so later, it might come twice
times = []


async def main():
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, lambda: (times.append(1), asked.set()))
    assert not times
    systemd.take_hangups()
    await asyncio.wait_for(asked.wait(), 30)
    asked.clear()
    os.kill(os.getpid(), signal.SIGHUP)
    await asyncio.wait_for(asked.wait(), 30)


asyncio.run(main())
print(len(times))
"""


def test_one_that_reaches_an_older_thread_waits_too() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _HELD], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")


def test_one_that_comes_while_the_router_starts_is_heard_when_it_has(tmp_path: Path) -> None:
    config = tmp_path / "evenstep.toml"
    settings = 'workers = ["http://127.0.0.1:9"]\npolicy = "jsq"\n'
    config.write_text(settings)
    port = free_port()
    command = [sys.executable, "-m", "router.cli", "serve", "--port", str(port)]
    command += ["--config", str(config)]
    with starting(command, port, tmp_path / "router.log") as router:
        status = Path(f"/proc/{router.process.pid}/status")
        wait_until(lambda: bool(_caught(status) & 1), 120, "the signal is held")
        changed = tmp_path / "changed.toml"
        changed.write_text(settings + "max_attempts = 3\n")
        changed.replace(config)  # at once: the router may read it at any time
        router.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "settings read again" in router.log.read_text(), 180, "it is heard")
        assert router.alive


def _caught(status: Path) -> int:
    """Signals with a handler, as bits; the lowest is SIGHUP."""
    told = re.search(r"^SigCgt:\s*(\w+)", status.read_text(), re.MULTILINE)
    return 0 if told is None else int(told[1], 16)
