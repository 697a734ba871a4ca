r"""A logits processor that reports each request's probability of ending to the scheduler's plug-in.

    vllm serve MODEL --scheduler-cls … --logits-processors engine_patches.end_signal:EndSignal \
        --additional-config '{"evenstep": {"snapshots": "…", "end_signal": true}}'

It changes no logits. It reports the model's probability of the tokens that would end the request,
at the request's temperature (1 if it is greedy), before penalties, top-k, top-p and min-p. The
value is averaged over the latest tokens (``end_table.WINDOW_TOKENS``). For vLLM's first model
runner. Imported by vLLM only.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.sample.logits_processor import LogitsProcessor, process_dict_updates

from engine_patches.plugin import compat
from engine_patches.plugin.end_table import EndWriter, Flags, Ints, table_path
from engine_patches.plugin.settings import KEY

_ROWS_AT_ONCE = 64


@dataclass(eq=False, slots=True)
class _Request:
    """``output`` is vLLM's own list, which grows."""

    number: int
    row: int
    end_tokens: tuple[int, ...]
    temperature: float
    output: list[int]


@dataclass(slots=True)
class _Batch:
    """Inputs of a step's probabilities; rows and numbers are on the host, others on the device."""

    index: torch.Tensor
    tokens: torch.Tensor
    counts: torch.Tensor
    temperatures: torch.Tensor
    rows: Ints
    numbers: Ints


class EndSignal(LogitsProcessor):  # type: ignore[misc]
    """vLLM logits processor."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._pinned = is_pin_memory
        self._requests: dict[int, _Request] = {}
        self._batch: _Batch | None = None
        self._pending: deque[tuple[torch.Tensor, Any, _Batch, Flags]] = deque()
        self._writer: EndWriter | None = None
        settings = (vllm_config.additional_config or {}).get(KEY, {})
        if not settings.get("end_signal"):
            return
        compat.check_end_workers(vllm_config)
        if get_tensor_model_parallel_rank() == 0:
            path = table_path(*compat.engine_key(vllm_config))
            # A request that leaves the batch frees its row only after others have entered.
            self._writer = EndWriter(path, 2 * vllm_config.scheduler_config.max_num_seqs)

    def is_argmax_invariant(self) -> bool:
        # Nothing is changed, but vLLM skips invariant processors if all requests are greedy.
        return False

    def update_state(self, batch_update: Any) -> None:
        self._settle()
        if batch_update is None or self._writer is None:
            return
        before = set(self._requests.values())
        process_dict_updates(self._requests, batch_update, self._enter)
        for one in before.difference(self._requests.values()):
            self._writer.leave(one.row)
        self._batch = self._prepare()

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        batch = self._batch
        if batch is not None:
            # In chunks: a copy of all logits may exceed the free memory.
            starts = range(0, len(batch.rows), _ROWS_AT_ONCE)
            now = torch.cat([_probabilities(logits, batch, start) for start in starts])
            first = np.array([not self._requests[i].output for i in sorted(self._requests)])
            self._pending.append((*self._to_host(now), batch, first))
            self._settle()
        return logits

    def _enter(self, params: Any, _prompt: Any, output: list[int]) -> _Request | None:
        number = (params.extra_args or {}).get(compat.END_KEY)
        if number is None or self._writer is None:
            return None
        row = self._writer.enter(number)
        return _Request(number, row, compat.end_tokens(params), params.temperature or 1.0, output)

    def _prepare(self) -> _Batch | None:
        if not self._requests:
            return None
        requests = [self._requests[index] for index in sorted(self._requests)]
        width = max(1, *(len(one.end_tokens) for one in requests))
        tokens = [one.end_tokens + (0,) * (width - len(one.end_tokens)) for one in requests]

        def tensor(values: Any, kind: torch.dtype) -> torch.Tensor:
            made = torch.tensor(values, dtype=kind, pin_memory=self._pinned)
            return made.to(self._device, non_blocking=True)

        return _Batch(
            tensor(sorted(self._requests), torch.int64),
            tensor(tokens, torch.int64),
            tensor([[len(one.end_tokens)] for one in requests], torch.int64),
            tensor([[one.temperature] for one in requests], torch.float32),
            np.array([one.row for one in requests]),
            np.array([one.number for one in requests]),
        )

    def _to_host(self, values: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Values on the host, and the event that makes them valid (None: at once)."""
        if values.device.type == "cpu":
            return values, None
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=self._pinned)
        host.copy_(values, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return host, event

    def _settle(self) -> None:
        """Report the finished computations; never waits for the device."""
        while self._pending and self._writer is not None:
            values, event, batch, first = self._pending[0]
            if event is not None and not event.query():
                return
            self._pending.popleft()
            now = values.numpy().astype(np.float64)
            self._writer.take(batch.rows, batch.numbers, now, first)


def _probabilities(logits: torch.Tensor, batch: _Batch, start: int) -> torch.Tensor:
    """Probabilities that the next token ends the request, for the chunk at ``start``."""
    some = slice(start, start + _ROWS_AT_ONCE)
    scaled = logits[batch.index[some]].float() / batch.temperatures[some]
    chances = torch.softmax(scaled, dim=-1).gather(1, batch.tokens[some])
    counted = torch.arange(chances.shape[1], device=chances.device) < batch.counts[some]
    return torch.where(counted, chances, 0.0).sum(dim=1)
