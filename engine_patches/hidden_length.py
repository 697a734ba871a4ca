"""For experiments only: ends requests of real engines at the lengths of a trace, unannounced.

    vllm serve MODEL --logits-processors engine_patches.hidden_length:HiddenLength

A request ends at the length in its ``vllm_xargs``, ``evenstep_output_tokens``: its end token comes
then, and none before. The router and the scheduler see only its ``max_tokens``. A request that
ignores end tokens, or lacks the field, is unchanged. Emulated engines do the same. It works with
both of vLLM's model runners. Imported by vLLM only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.sample.logits_processor import process_dict_updates

from engine_patches.plugin.compat import HIDDEN_LENGTH_KEY, end_tokens
from engine_patches.plugin.runners import Chosen, FirstRunners, SecondRunners, Slots, on_device

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


class _First(FirstRunners):  # type: ignore[misc]
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
        return on_device(values, kind, self._device, pinned=self._pinned)


def _enter(params: Any, _prompt: Any, output: list[int]) -> _Request | None:
    hidden = _hidden(params)
    return None if hidden is None else _Request(*hidden, output)


def _hidden(params: Any) -> tuple[int, tuple[int, ...]] | None:
    """A request's length, and the tokens that end it; None: it ends by itself, or not at all."""
    length = (params.extra_args or {}).get(HIDDEN_LENGTH_KEY)
    ends = end_tokens(params)
    return None if length is None or params.ignore_eos or not ends else (length, ends)


class _Second(SecondRunners):  # type: ignore[misc]
    """Each step writes all its logits in one operation, by the positions that vLLM gives.

    Drafted tokens have positions of their own.
    """

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self._prompts, self._slots = req_states.prompt_len, Slots(req_states)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        length, ends = _hidden(sampling_params) or (0, ())
        # The position of what the last token comes after.
        self._slots.set(req_idx, ends, float(self._prompts.np[req_idx]) + length - 2)
        return bool(ends)

    def apply_staged_writes(self) -> None:
        self._slots.flush()

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        slots = ctx.expanded_idx_mapping.long()
        ends, last = self._slots.tokens[slots], self._slots.values[slots, None]
        # What is no end token stands for the first one, or for a token that stays as it is.
        tokens = torch.where(ends < 0, ends[:, :1], ends).clamp(min=0)
        before = logits.gather(1, tokens)
        certain = torch.where(tokens == tokens[:, :1], _CERTAIN, before)
        after = torch.where(ctx.pos[:, None] >= last, certain, -math.inf)
        return logits.scatter_(1, tokens, torch.where(ends[:, :1] < 0, before, after))


class HiddenLength(Chosen):
    """vLLM logits processor."""

    first, second = _First, _Second

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """A ValueError is reported to the client."""
        length = (sampling_params.extra_args or {}).get(HIDDEN_LENGTH_KEY)
        if length is not None and (type(length) is not int or length < 1):
            raise ValueError(f"{HIDDEN_LENGTH_KEY} must be a positive integer")
