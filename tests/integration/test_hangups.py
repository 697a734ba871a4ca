"""SIGHUP waits for whoever takes it, whichever thread it reaches."""

from __future__ import annotations

import subprocess
import sys

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
