r"""A logits processor that reports each request's probability of ending to the plug-in.

    vllm serve MODEL --scheduler-cls … --logits-processors engine_patches.end_signal:EndSignal \
        --additional-config '{"evenstep": {"snapshots": "…", "end_signal": true}}'

It changes no logits. It reports the model's probability of the tokens that would end the request,
at the request's temperature (1 if it is greedy), before top-k, top-p and min-p. The value is
averaged over the latest tokens (``end_table.WINDOW_TOKENS``). It works with both of vLLM's model
runners. Imported by vLLM only.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.sample.logits_processor import process_dict_updates

from engine_patches.plugin import compat
from engine_patches.plugin.end_table import EndWriter, Flags, Ints, table_path
from engine_patches.plugin.runners import Chosen, FirstRunners, SecondRunners, Slots, on_device
from engine_patches.plugin.settings import KEY

_ROWS_AT_ONCE = 64


@dataclass(slots=True)
class _Batch:
    """Requests of a step; what concerns the logits is on the device, the rest on the host."""

    index: torch.Tensor  # rows of the logits
    tokens: torch.Tensor  # that end each request; -1: none
    temperatures: torch.Tensor  # one column
    rows: Ints  # of the table
    numbers: Ints  # 0: nothing is sampled, or nobody wants to know


class _Signal:
    """Computes a step's probabilities and writes them into the table as they come."""

    def __init__(self, writer: EndWriter, device: torch.device, *, pinned: bool) -> None:
        self.writer, self.device, self.pinned = writer, device, pinned
        self._pending: deque[tuple[torch.Tensor, Any, _Batch, Flags]] = deque()

    def take(self, logits: torch.Tensor, batch: _Batch, first: Flags) -> None:
        """``first``: as of ``EndWriter.take``."""
        # In chunks: a copy of all logits may exceed the free memory.
        starts = range(0, len(batch.rows), _ROWS_AT_ONCE)
        now = torch.cat([_probabilities(logits, batch, start) for start in starts])
        self._pending.append((*self._to_host(now), batch, first))
        self.settle()

    def settle(self) -> None:
        """Report the finished computations; never waits for the device."""
        while self._pending:
            values, event, batch, first = self._pending[0]
            if event is not None and not event.query():
                return
            self._pending.popleft()
            now = values.numpy().astype(np.float64)
            self.writer.take(batch.rows, batch.numbers, now, first)

    def tensor(self, values: Any, kind: torch.dtype) -> torch.Tensor:
        return on_device(values, kind, self.device, pinned=self.pinned)

    def _to_host(self, values: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Values on the host, and the event that makes them valid (None: at once)."""
        if values.device.type == "cpu":
            return values, None
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=self.pinned)
        host.copy_(values, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return host, event


def _probabilities(logits: torch.Tensor, batch: _Batch, start: int) -> torch.Tensor:
    """Probabilities that the next token ends the request, for the chunk at ``start``."""
    some = slice(start, start + _ROWS_AT_ONCE)
    tokens = batch.tokens[some]
    scaled = logits[batch.index[some]].float() / batch.temperatures[some]
    chances = torch.softmax(scaled, dim=-1).gather(1, tokens.clamp(min=0))
    return torch.where(tokens >= 0, chances, 0.0).sum(dim=1)


def _signal(vllm_config: Any, device: torch.device, slots: int, *, pinned: bool) -> _Signal | None:
    """None: it is not wanted, or another worker's business; ``slots``: rows of the table."""
    settings = (vllm_config.additional_config or {}).get(KEY, {})
    if not settings.get("end_signal"):
        return None
    compat.check_end_workers(vllm_config)
    if get_tensor_model_parallel_rank() != 0:
        return None
    return _Signal(
        EndWriter(table_path(*compat.engine_key(vllm_config)), slots), device, pinned=pinned
    )


def _number(params: Any) -> int:
    return (params.extra_args or {}).get(compat.END_KEY) or 0


@dataclass(eq=False, slots=True)
class _Request:
    """``output`` is vLLM's own list, which grows; ``known``: its length as the request entered."""

    number: int
    row: int
    end_tokens: tuple[int, ...]
    temperature: float
    output: list[int]
    known: int


class _First(FirstRunners):  # type: ignore[misc]
    """Rows of the logits are vLLM's batch, which tells of its changes."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        # A request that leaves the batch frees its row only after others have entered.
        slots = 2 * vllm_config.scheduler_config.max_num_seqs
        self._signal = _signal(vllm_config, device, slots, pinned=is_pin_memory)
        self._requests: dict[int, _Request] = {}
        self._batch: _Batch | None = None
        # Those that have no token since they entered, with their places in the batch.
        self._fresh: list[tuple[int, _Request]] = []

    def is_argmax_invariant(self) -> bool:
        # Nothing is changed, but vLLM skips invariant processors if all requests are greedy.
        return False

    def update_state(self, batch_update: Any) -> None:
        if self._signal is None:
            return
        self._signal.settle()
        if batch_update is None:
            return
        before = set(self._requests.values())
        process_dict_updates(self._requests, batch_update, self._enter)
        for one in before.difference(self._requests.values()):
            self._signal.writer.leave(one.row)
        self._prepare(self._signal)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if self._signal is not None and self._batch is not None:
            self._fresh = [each for each in self._fresh if len(each[1].output) == each[1].known]
            first = np.zeros(len(self._batch.rows), np.bool_)
            first[[place for place, _ in self._fresh]] = True
            self._signal.take(logits, self._batch, first)
        return logits

    def _enter(self, params: Any, _prompt: Any, output: list[int]) -> _Request | None:
        number = _number(params)
        if not number or self._signal is None:
            return None
        row = self._signal.writer.enter(number)
        ends, heat = compat.end_tokens(params), params.temperature or 1.0
        return _Request(number, row, ends, heat, output, len(output))

    def _prepare(self, signal: _Signal) -> None:
        requests = [self._requests[index] for index in sorted(self._requests)]
        self._fresh = [*enumerate(requests)]
        self._batch = None
        if requests:
            width = max(1, *(len(one.end_tokens) for one in requests))
            tokens = [(*one.end_tokens, *[-1] * (width - len(one.end_tokens))) for one in requests]
            self._batch = _Batch(
                signal.tensor(sorted(self._requests), torch.int64),
                signal.tensor(tokens, torch.int64),
                signal.tensor([[one.temperature] for one in requests], torch.float32),
                np.array([one.row for one in requests]),
                np.array([one.number for one in requests]),
            )


class _Second(SecondRunners):  # type: ignore[misc]
    """A request keeps its slot, which is its row of the table; nobody says that it has left.

    With speculative decoding a request has several rows of the logits. The first one counts: what
    comes before it is certain.
    """

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        pinned, slots = req_states.device.type == "cuda", req_states.max_num_reqs
        self._signal = _signal(vllm_config, req_states.device, slots, pinned=pinned)
        self._state = req_states
        self._slots = Slots(req_states)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """False: its logits need not be looked at."""
        if self._signal is None:
            return False
        number = _number(sampling_params)
        self._signal.writer.hold(req_idx, number)
        ends = compat.end_tokens(sampling_params) if number else ()
        self._slots.set(req_idx, ends, sampling_params.temperature or 1.0)
        return number != 0

    def apply_staged_writes(self) -> None:
        if self._signal is not None:
            self._signal.settle()
            self._slots.flush()

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        signal, rows = self._signal, ctx.idx_mapping_np.astype(np.int64)
        if signal is None or not len(rows):
            return logits
        # Rows of one request follow each other, and requests stand as in ``rows``.
        index = torch.argsort(ctx.expanded_local_pos, stable=True)[: len(rows)]
        slots = ctx.expanded_idx_mapping[index].long()
        sampled = ctx.seq_lens_upper_bound_np[: len(rows)] >= self._state.prefill_len.np[rows]
        numbers = np.where(sampled, signal.writer.numbers[rows], 0)
        tokens, temperatures = self._slots.tokens[slots], self._slots.values[slots, None]
        batch = _Batch(index, tokens, temperatures, rows, numbers)
        signal.take(logits, batch, np.zeros(len(rows), np.bool_))
        return logits


class EndSignal(Chosen):
    """vLLM logits processor."""

    first, second = _First, _Second
