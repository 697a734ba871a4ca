"""What vLLM's two model runners (V1 and V2) want of a logits processor. Imported by vLLM only.

V2 takes logits processors of users since vLLM 0.31; before, vLLM uses V1 where one is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.sample.logits_processor import LogitsProcessor as FirstRunners

try:
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as SecondRunners
except ImportError:

    class SecondRunners:  # type: ignore[no-redef]
        """Stands for what vLLM before 0.31 does not have."""


__all__ = ["Chosen", "FirstRunners", "SecondRunners", "Slots", "on_device"]


class Chosen(FirstRunners, SecondRunners):  # type: ignore[misc]
    """The class that vLLM loads; an object of it is a ``first`` for runner V1, a ``second`` for V2.

    Each runner insists on a class of its own interface.
    """

    first: type
    second: type

    def __new__(cls, vllm_config: Any, *given: Any, **named: Any) -> Any:
        runners_own = cls.second if len(given) + len(named) == 1 else cls.first
        return runners_own(vllm_config, *given, **named)


def on_device(
    values: Any, kind: torch.dtype, device: torch.device, *, pinned: bool
) -> torch.Tensor:
    """A tensor that is copied without waiting for the device."""
    made = torch.tensor(values, dtype=kind, pin_memory=pinned)
    return made.to(device, non_blocking=True)


class Slots:
    """What the second runner's requests keep while they run, by slot.

    ``tokens`` that end each request (-1: none) and one of its ``values`` are on the device, from
    ``flush`` on.
    """

    tokens: torch.Tensor
    values: torch.Tensor

    def __init__(self, req_states: Any) -> None:
        self._device = req_states.device
        self._tokens = np.full((req_states.max_num_reqs, 1), -1)
        self._values = np.zeros(req_states.max_num_reqs, np.float32)
        self._changed = True
        self.flush()

    def set(self, slot: int, tokens: Sequence[int], value: float) -> None:
        if (wider := len(tokens) - self._tokens.shape[1]) > 0:
            self._tokens = np.pad(self._tokens, ((0, 0), (0, wider)), constant_values=-1)
        self._tokens[slot] = -1
        self._tokens[slot, : len(tokens)] = tokens
        self._values[slot] = value
        self._changed = True

    def flush(self) -> None:
        if self._changed:
            pinned, self._changed = self._device.type == "cuda", False
            self.tokens = on_device(self._tokens, torch.int64, self._device, pinned=pinned)
            self.values = on_device(self._values, torch.float32, self._device, pinned=pinned)
