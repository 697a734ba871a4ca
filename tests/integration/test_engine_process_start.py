"""Each process of a CPU engine sleeps where it would yield, and requests AMX."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.engine.serve import PROCESS_START
from tests.support.server import Server

_TOLD = """
import os, posix, time
began_s = time.monotonic()
for _ in range(100):
    os.sched_yield()
print(os.sched_yield is posix.sched_yield, time.monotonic() - began_s)
"""


def test_where_a_process_would_yield_it_sleeps() -> None:
    for path, same in (str(PROCESS_START), "False"), ("", "True"):
        environment = {**os.environ, "PYTHONPATH": path}
        told = subprocess.check_output([sys.executable, "-c", _TOLD], text=True, env=environment)
        is_own, took_s = told.split()
        assert is_own == same
        assert same == "True" or float(took_s) >= 100 * 50e-6


_PERMITTED = """
import ctypes
prctl, got, had = ctypes.CDLL(None).syscall, ctypes.c_ulong(), ctypes.c_ulong()
prctl(158, 0x1021, ctypes.byref(had)), prctl(158, 0x1022, ctypes.byref(got))
print(had.value >> 18 & 1, got.value >> 18 & 1)
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is a part of x86_64")
def test_a_process_may_use_amx_where_there_is_any() -> None:
    for path, requested in (str(PROCESS_START), True), ("", False):
        environment = {**os.environ, "PYTHONPATH": path}
        said = subprocess.check_output(
            [sys.executable, "-c", _PERMITTED], text=True, env=environment
        )
        supported, permitted = map(int, said.split())
        assert permitted == (requested and supported)


@pytest.mark.engine
@pytest.mark.timeout(400)
def test_an_engine_starts_so(engine: Server) -> None:
    environment = Path(f"/proc/{engine.process.pid}/environ").read_bytes().split(b"\0")
    (path,) = (line for line in environment if line.startswith(b"PYTHONPATH="))
    assert str(PROCESS_START) in path.decode().removeprefix("PYTHONPATH=").split(os.pathsep)
