"""For experiments only: ends requests of real engines at the lengths of a trace, unannounced.

    vllm serve MODEL --logits-processors engine_patches.hidden_length:HiddenLength

A request's end token comes as token ``evenstep_output_tokens`` of its ``vllm_xargs``, none earlier.
The router and the scheduler see its ``max_tokens`` alone. A request that ignores end tokens, or
lacks the field, is unchanged. The emulated engine does the same. For vLLM's first model runner.
Imported by vLLM only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor, process_dict_updates

from engine_patches.plugin.compat import HIDDEN_LENGTH_KEY, end_tokens

# Next to it every other token's probability is 0 in 32 bits at any temperature. It stays finite
# when divided by the lowest temperature that vLLM samples at.
_CERTAIN = 1e30


@dataclass(slots=True)
class _Request:
    """``output`` is vLLM's own list, which grows."""

    output_tokens: int
    end_tokens: tuple[int, ...]
    output: list[int]

    @property
    def left(self) -> int:
        return self.output_tokens - 1 - len(self.output)


class HiddenLength(LogitsProcessor):  # type: ignore[misc]
    """Each step writes all its logits in one operation on the device, without synchronization.

    The written values change only when requests enter, leave or reach their last token.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._pinned = is_pin_memory
        self._requests: dict[int, _Request] = {}
        self._last: frozenset[int] | None = None
        self._steps_left: float = 0
        self._places: tuple[torch.Tensor, torch.Tensor] = (torch.tensor(()), torch.tensor(()))
        self._values = torch.tensor(())

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """A ValueError is reported to the client."""
        length = (sampling_params.extra_args or {}).get(HIDDEN_LENGTH_KEY)
        if length is not None and (type(length) is not int or length < 1):
            raise ValueError(f"{HIDDEN_LENGTH_KEY} must be a positive integer")

    def is_argmax_invariant(self) -> bool:
        # It makes the end token win, or suppresses it.
        return False

    def update_state(self, batch_update: Any) -> None:
        if process_dict_updates(self._requests, batch_update, _enter):
            self._last, self._steps_left = None, 0

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if not self._requests:
            return logits
        if self._steps_left <= 0:
            self._look()
        self._steps_left -= 1
        return logits.index_put_(self._places, self._values)

    def _look(self) -> None:
        """Find the requests whose last token is due, and the steps until the next one may be."""
        left = {index: one.left for index, one in self._requests.items()}
        last = frozenset(index for index, tokens in left.items() if tokens <= 0)
        # A request gets at most one token a step. One that got its last token stays covered until
        # it leaves: vLLM may take tokens back.
        self._steps_left = 0 if last else min(left.values(), default=math.inf)
        if last != self._last:
            self._last = last
            self._prepare(last)

    def _prepare(self, last: frozenset[int]) -> None:
        """Build the values to write and their indices (rows, tokens) on the model's device."""
        places = [
            (index, token, _CERTAIN if index in last else -math.inf)
            for index, one in self._requests.items()
            for token in (one.end_tokens[:1] if index in last else one.end_tokens)
        ]
        rows, tokens, values = zip(*places, strict=True)
        self._places = (self._tensor(rows, torch.int64), self._tensor(tokens, torch.int64))
        self._values = self._tensor(values, torch.float32)

    def _tensor(self, values: Any, kind: torch.dtype) -> torch.Tensor:
        made = torch.tensor(values, dtype=kind, pin_memory=self._pinned)
        return made.to(self._device, non_blocking=True)


def _enter(params: Any, _prompt: Any, output: list[int]) -> _Request | None:
    length = (params.extra_args or {}).get(HIDDEN_LENGTH_KEY)
    ends = end_tokens(params)
    if length is None or params.ignore_eos or not ends:
        return None
    return _Request(length, ends, output)
