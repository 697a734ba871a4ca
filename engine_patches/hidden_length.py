"""For experiments only: requests of real engines end where a trace says, and nobody is told before.

    vllm serve MODEL --logits-processors engine_patches.hidden_length:HiddenLength

A request whose ``vllm_xargs`` hold ``evenstep_output_tokens`` gets its end token as that token of
its output, and none earlier; the router and the scheduler see its ``max_tokens`` alone. One that
ignores end tokens, or has no such field, is left as it is. As in the emulated engine; for vLLM's
first model runner. Imported by vLLM only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor, process_dict_updates

from engine_patches.compat import HIDDEN_LENGTH_KEY, end_tokens


@dataclass(slots=True)
class _Request:
    """A request that ends at a length; ``output`` is vLLM's own list, which grows."""

    output_tokens: int
    end_tokens: tuple[int, ...]
    output: list[int]


class HiddenLength(LogitsProcessor):  # type: ignore[misc]
    """One of vLLM's logits processors."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._requests: dict[int, _Request] = {}

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Refuse what is no length.

        Raises:
            ValueError: the client is told.
        """
        length = (sampling_params.extra_args or {}).get(HIDDEN_LENGTH_KEY)
        if length is not None and (type(length) is not int or length < 1):
            raise ValueError(f"{HIDDEN_LENGTH_KEY} must be a positive integer")

    def is_argmax_invariant(self) -> bool:
        """The end token wins, or cannot."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """As vLLM's: who is in the batch, before each step."""
        process_dict_updates(self._requests, batch_update, _enter)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """As vLLM's."""
        for index, one in self._requests.items():
            if len(one.output) + 1 < one.output_tokens:
                logits[index, list(one.end_tokens)] = -torch.inf
            else:
                logits[index] = -torch.inf
                logits[index, one.end_tokens[0]] = 0.0
        return logits


def _enter(params: Any, _prompt: Any, output: list[int]) -> _Request | None:
    length = (params.extra_args or {}).get(HIDDEN_LENGTH_KEY)
    ends = end_tokens(params)
    if length is None or params.ignore_eos or not ends:
        return None
    return _Request(length, ends, output)
