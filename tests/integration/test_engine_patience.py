"""Engines on few cores leave time to what is tested beside them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.engine.serve import PATIENCE
from tests.support.server import Server


def test_where_a_process_would_yield_it_sleeps() -> None:
    told = "import os, posix; print(os.sched_yield is posix.sched_yield)"
    environment = {**os.environ, "PYTHONPATH": str(PATIENCE)}
    for extra, same in ({}, "False"), ({"PYTHONPATH": ""}, "True"):
        command = [sys.executable, "-c", told]
        assert subprocess.check_output(command, text=True, env=environment | extra) == f"{same}\n"


@pytest.mark.engine
@pytest.mark.timeout(400)
def test_an_engine_is_told_so(engine: Server) -> None:
    environment = Path(f"/proc/{engine.process.pid}/environ").read_bytes().split(b"\0")
    (path,) = (line for line in environment if line.startswith(b"PYTHONPATH="))
    assert str(PATIENCE) in path.decode().removeprefix("PYTHONPATH=").split(os.pathsep)
