"""Cross-check at startup: the KV cache against the memory that NVML shows for the engine.

vLLM allocates the whole cache at startup, so NVML shows the same memory for an empty and a full
cache. Only the block pool knows how full it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_GIB = 2**30


def cross_check(nvml: Any, handles: Iterable[Any], kv_bytes: int, blocks: int) -> tuple[bool, str]:
    """Compare each GPU's part of the KV cache (``kv_bytes``) with the memory used there.

    ``blocks`` includes the placeholder. Returns whether all have enough in use, and a line for the
    log; without data, NVML's own exceptions.
    """
    found = [_taken(nvml, handle) for handle in handles]
    enough = all(taken >= kv_bytes for taken, _ in found)
    seen = ", ".join(f"{taken / _GIB:.2f} GiB {holder}" for taken, holder in found)
    verdict = "allocated whole; how full it is comes from the block pool, which NVML cannot see"
    if not enough:
        verdict = "less than the cache: it lies elsewhere, or these are not the rank's GPUs"
    per_block = kv_bytes // max(blocks, 1)
    cache = f"{blocks} blocks x {per_block} bytes = {kv_bytes / _GIB:.2f} GiB"
    return enough, f"KV cache: {cache}; NVML: {seen}: {verdict}"


def _taken(nvml: Any, handle: Any) -> tuple[int, str]:
    """The engine's bytes on a GPU; those of all processes if they are not told apart."""
    processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    held = [one.usedGpuMemory for one in processes if is_ours(one.pid)]
    if held and None not in held:
        shared = " (other processes use it too, and its power includes theirs)" * (
            len(held) < len(processes)
        )
        return sum(held), f"held by this engine{shared}"
    # In a container the process ids differ from NVML's.
    return int(nvml.nvmlDeviceGetMemoryInfo(handle).used), "held by all processes of the GPU"


def is_ours(pid: int) -> bool:
    """Whether a process is this one or descends from it."""
    while pid > 1:
        if pid == os.getpid():
            return True
        try:
            status = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return False
        # The process name, in brackets, may contain anything; the parent's id comes after it.
        pid = int(status.rpartition(")")[2].split()[1])
    return False
