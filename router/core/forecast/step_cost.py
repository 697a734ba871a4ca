"""Cost of a request for its worker, step by step, in KV tokens' worth of work.

These are BF-IO's general workload profiles (arXiv 2601.17855, sections 3 and 5.1): KV growth with
full attention or a sliding window, a common drift per step, a cost per running request, and prefill
chunks on workers that compute prompts too. MLA has fewer bytes per token, not fewer tokens: its
profile is that of full attention.

Arrays of shape (n, K) are stored step by step, since numpy is fast along the long axis n.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

DEFAULT_CHUNK = 2048


@dataclass(frozen=True, slots=True)
class WorkProfile:
    """Work of one running request, equal for all requests of a group.

    Attributes:
        growth: tokens gained per step: 1 for plain decoding, more with accepted drafts of
            speculative decoding, 0 for constant work.
        window: tokens that a sliding-window layer attends to; None: full attention.
        window_share: fraction of the layers with the window.
        request_tokens: fixed cost of a running request, t_r / t_l.
        prefill_beta: work per computed prompt token; 0 where other workers prefill.
        prefill_chunk: most prompt tokens of a request per step.

    Raises:
        ValueError: a value is out of range; the message names the range.
    """

    growth: float = 1.0
    window: int | None = None
    window_share: float = 1.0
    request_tokens: float = 0.0
    prefill_beta: float = 0.0
    prefill_chunk: int = DEFAULT_CHUNK

    def __post_init__(self) -> None:
        for name in ("growth", "request_tokens", "prefill_beta"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} {getattr(self, name)}: give a number from 0 up")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window {self.window}: give 1 token or more, or none at all")
        if not 0 <= self.window_share <= 1:
            raise ValueError(f"window_share {self.window_share}: give a fraction from 0 to 1")
        if self.prefill_chunk < 1:
            raise ValueError(f"prefill_chunk {self.prefill_chunk}: give 1 token or more")

    @property
    def plain(self) -> bool:
        """True if work is linear in tokens and steps: no window, no prefill."""
        return self.window is None and self.prefill_beta == 0

    @property
    def step_tokens(self) -> float:
        """Output tokens of a decode step: more than one with accepted drafts."""
        return max(1.0, self.growth)

    def work(self, tokens: Ints, prefill_left: Ints, steps: int) -> Floats:
        """Work of going requests over the coming steps.

        A prompt counts in full from its request's first step, computed or not, as in snapshots.

        Args:
            tokens: shape (n,), prompt and generated tokens at the next step.
            prefill_left: shape (n,), prompt tokens still to be computed.
            steps: K.

        Returns:
            Shape (n, K): work at step k + h in column h.
        """
        if self.plain:
            ahead = np.arange(steps, dtype=np.float64)
            return (tokens + (self.request_tokens + self.growth * ahead)[:, None]).T
        return self.work_at(tokens, prefill_left, np.arange(steps)[:, None]).T

    def work_at(self, tokens: Ints, prefill_left: Ints, ahead: Ints) -> Floats:
        """Work at steps k + ahead; shape (K, n) for steps of shape (K, 1)."""
        held: Floats = tokens + self.growth * self.decoded(prefill_left, ahead)
        if self.window is not None:
            seen = np.minimum(held, self.window)
            held = (1 - self.window_share) * held + self.window_share * seen
        held += self.request_tokens
        if self.prefill_beta > 0:
            left = np.maximum(0, prefill_left - ahead * self.prefill_chunk)
            held += self.prefill_beta * np.minimum(self.prefill_chunk, left)
        return held

    def decoded(self, prefill_left: Ints, ahead: Ints) -> Ints:
        """Number of steps before k + ahead that yield tokens, a prefill's last step included.

        Shape (K, n) for steps of shape (K, 1); the shape of the steps if nothing is prefilled.
        """
        if self.prefill_beta == 0:
            return ahead
        steps: Ints = np.maximum(0, ahead - self.steps_before_first(prefill_left))
        return steps

    def steps_before_first(self, prefill_left: Ints) -> Ints:
        """Steps that compute a prompt without yielding a token; shape (n,)."""
        if self.prefill_beta == 0:
            return np.zeros_like(prefill_left)
        return np.maximum(0, -(-prefill_left // self.prefill_chunk) - 1)
