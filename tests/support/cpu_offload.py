"""vLLM's CPU offloading where the engine itself runs on a CPU; vLLM's own copies need a GPU.

Only the copies are made here. What is offloaded, evicted, loaded and told is vLLM's decision.
"""

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class Copies(OffloadingWorker):  # type: ignore[misc]
    """Copies at once, blocks alike on both sides."""

    def __init__(self, caches: Any, chunks: int) -> None:
        self._near = [one.tensor for one in caches.tensors]
        self._far = [torch.empty((chunks, one.shape[1]), dtype=one.dtype) for one in self._near]
        self._done: list[Any] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._near, src_spec, self._far, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._far, src_spec, self._near, dst_spec)

    def get_finished(self) -> list[Any]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """All are done."""

    def _copy(self, job_id: int, source: Any, taken: Any, target: Any, given: Any) -> bool:
        for old, new in zip(source, target, strict=True):
            new[torch.as_tensor(given.block_ids)] = old[torch.as_tensor(taken.block_ids)]
        self._done.append(TransferResult(job_id=job_id, success=True))
        return True


class Spec(CPUOffloadingSpec):  # type: ignore[misc]
    """As ``CPUOffloadingSpec``, which refuses engines without a GPU."""

    def get_worker(self, kv_caches: Any) -> Copies:
        return Copies(kv_caches, self.num_chunks)
