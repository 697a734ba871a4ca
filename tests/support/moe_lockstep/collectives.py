"""A general plug-in for vLLM: mixture-of-experts ranks that step together on a CPU, for tests.

A layer of experts takes the tokens of all ranks in and gives each rank its own back, as many as
it has in this step. vLLM 0.32 has the two collectives that do so for GPUs only; here they are for
CPUs, over gloo. Imported by vLLM, in the engine's own interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


def register() -> None:
    """Give the communicator what it lacks; vLLM calls this in each of its processes."""
    for method in (all_gatherv, reduce_scatterv):
        name = method.__name__
        if getattr(CpuCommunicator, name) is getattr(DeviceCommunicatorBase, name):
            setattr(CpuCommunicator, name, method)


def all_gatherv(
    communicator: Any,
    input_: Tensor | Sequence[Tensor],
    dim: int = 0,
    sizes: Sequence[int] | None = None,
) -> Tensor | list[Tensor]:
    """The rows of all ranks below each other; ``sizes`` says how many each has."""
    if not isinstance(input_, Tensor):
        return [_gather(communicator, one, dim, sizes) for one in input_]
    return _gather(communicator, input_, dim, sizes)


def reduce_scatterv(
    communicator: Any, input_: Tensor, dim: int = -1, sizes: Sequence[int] | None = None
) -> Tensor:
    """This rank's rows of the sum over all ranks, which is taken in 32 bits."""
    rows = _row_counts(communicator, input_.shape[0] // communicator.world_size, dim, sizes)
    total = input_.to(torch.float32).contiguous()
    distributed.all_reduce(total, group=communicator.cpu_group)
    own = torch.split(total, rows)[communicator.rank_in_group]
    return own.to(input_.dtype)


def _gather(communicator: Any, rows: Tensor, dim: int, sizes: Sequence[int] | None) -> Tensor:
    counts = _row_counts(communicator, rows.shape[0], dim, sizes)
    # gloo gathers equal parts only.
    padded = rows.new_zeros((max(counts), *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    parts = [torch.empty_like(padded) for _ in counts]
    distributed.all_gather(parts, padded, group=communicator.cpu_group)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def _row_counts(communicator: Any, own: int, dim: int, sizes: Sequence[int] | None) -> list[int]:
    if dim != 0:
        raise NotImplementedError(f"rows only, not dimension {dim}")
    return [own] * communicator.world_size if sizes is None else list(sizes)
