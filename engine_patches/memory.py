"""The KV cache beside what NVML says that the engine holds: a cross-check when it starts.

vLLM allocates the whole cache then, so NVML shows the same whether it is empty or full: how full it
is, only the block pool knows.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_GIB = 2**30


def cross_check(nvml: Any, handles: Iterable[Any], kv_bytes: int, blocks: int) -> tuple[bool, str]:
    """Compare each GPU's part of the KV cache with the memory that is taken there.

    Args:
        nvml: the module ``pynvml``, initialized.
        handles: the rank's GPUs.
        kv_bytes: of the KV cache, on each of them.
        blocks: KV blocks, the placeholder included.

    Returns:
        Whether memory enough is taken on all of them, and a line for the log.

    Raises:
        Exception: NVML's, where it cannot tell.
    """
    found = [_taken(nvml, handle) for handle in handles]
    enough = all(taken >= kv_bytes for taken, _ in found)
    seen = ", ".join(f"{taken / _GIB:.2f} GiB {who}" for taken, who in found)
    verdict = "allocated whole; how full it is comes from the block pool, which NVML cannot see"
    if not enough:
        verdict = "less than the cache: it lies elsewhere, or these are not the rank's GPUs"
    per_block = kv_bytes // max(blocks, 1)
    cache = f"{blocks} blocks x {per_block} bytes = {kv_bytes / _GIB:.2f} GiB"
    return enough, f"KV cache: {cache}; NVML: {seen}: {verdict}"


def _taken(nvml: Any, handle: Any) -> tuple[int, str]:
    """Bytes that the engine holds on a GPU; of all processes where it is not told apart."""
    processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    held = [one.usedGpuMemory for one in processes if is_ours(one.pid)]
    if held and None not in held:
        shared = " (other processes use it too, and its power includes theirs)" * (
            len(held) < len(processes)
        )
        return sum(held), f"held by this engine{shared}"
    # In a container process ids are not those that NVML has.
    return int(nvml.nvmlDeviceGetMemoryInfo(handle).used), "held by all processes of the GPU"


def is_ours(pid: int) -> bool:
    """Whether a process is this one or descends from it."""
    while pid > 1:
        if pid == os.getpid():
            return True
        pid = _parent(pid)
    return False


def _parent(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    # The name before it, in brackets, may hold anything.
    return int(status.rpartition(")")[2].split()[1])
