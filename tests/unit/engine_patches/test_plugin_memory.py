from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from engine_patches.plugin.memory import cross_check, is_ours

GIB = 2**30


class FakeNvml:
    """Stands in for ``pynvml``: two GPUs, and the memory of processes on each, by process id."""

    def __init__(self, **held: dict[int, int | None]) -> None:
        self._held = held

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:  # noqa: N802
        held = self._held[handle].items()
        return [SimpleNamespace(pid=pid, usedGpuMemory=memory) for pid, memory in held]

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:  # noqa: N802
        return SimpleNamespace(used=sum(memory or 0 for memory in self._held[handle].values()))


def test_the_cache_beside_the_memory_of_the_engines_processes() -> None:
    me = os.getpid()
    nvml = FakeNvml(a={me: 30 * GIB, 1: 5 * GIB}, b={me: 25 * GIB})
    enough, line = cross_check(nvml, "ab", 20 * GIB, 10_240)
    assert enough
    assert "10240 blocks x 2097152 bytes = 20.00 GiB" in line
    others = "(other processes use it too, and its power includes theirs)"
    assert f"30.00 GiB held by this engine {others}, 25.00" in line
    assert "block pool" in line


def test_less_than_the_cache_is_said() -> None:
    nvml = FakeNvml(a={os.getpid(): 30 * GIB}, b={os.getpid(): 19 * GIB})
    enough, line = cross_check(nvml, "ab", 20 * GIB, 10)
    assert not enough
    assert "less than the cache" in line


@pytest.mark.parametrize("others", [{1: 24 * GIB}, {1: 24 * GIB, os.getpid(): None}])
def test_processes_that_cannot_be_told_apart_count_together(others: dict[int, int | None]) -> None:
    enough, line = cross_check(FakeNvml(a=others), "a", 20 * GIB, 10)
    assert enough
    assert "24.00 GiB held by all processes of the GPU" in line


def test_a_workers_process_is_the_engines() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert is_ours(child.pid)
    finally:
        child.communicate(b"\n", timeout=60)
    assert is_ours(os.getpid())
    assert not is_ours(os.getppid())
    assert not is_ours(2**22 + 1)  # no such process
