"""What a step of an emulated engine computes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Schedule:
    """Plan of a step at its start."""

    admitted: tuple[str, ...]
    preempted: tuple[str, ...]
    prefill_tokens: int  # tokens computed for prompts and for requests that return
    decode_tokens: int  # one for each decoding request, and its drafts
    failed: tuple[str, ...] = ()  # ids of requests that ended because their fetch failed
    # Time of the next schedule if there is nothing to compute; None: at the next event.
    wake_s: float | None = None

    @property
    def empty(self) -> bool:
        """True if it computes nothing and changed no request."""
        computed = self.prefill_tokens or self.decode_tokens
        return not (computed or self.preempted or self.failed)


class Budget:
    """Token budget of a step: in all, of prompts and of each prompt; and what the step computes."""

    def __init__(
        self, tokens: int, prompts: int | None = None, drafts: int = 0, each: int | None = None
    ) -> None:
        self.left = tokens
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self._prompts = prompts
        self._drafts = drafts
        self._each = each

    @property
    def prompts_left(self) -> int:
        left = max(0, self.left)
        return left if self._prompts is None else min(left, self._prompts - self.prefill_tokens)

    def decode(self, requests: int) -> None:
        tokens = requests * (1 + self._drafts)
        self.decode_tokens += tokens
        self.left -= tokens

    def prefill(self, prompt_tokens: int) -> int:
        """Compute as much of a prompt as fits; return the tokens left."""
        tokens = min(self.prompts_left, prompt_tokens)
        if self._each is not None:
            tokens = min(tokens, self._each)
        self.prefill_tokens += tokens
        self.left -= tokens
        return prompt_tokens - tokens


class Drafts:
    """Speculative decoding: each position of a draft, if those before it are, is accepted.

    ``acceptance`` has the probability of each position.
    """

    def __init__(self, acceptance: Sequence[float], rng: np.random.Generator) -> None:
        self.count = len(acceptance)
        # Probability that at least so many are accepted, from one on.
        self._at_least = np.cumprod(np.array(acceptance, dtype=np.float64))
        self._rng = rng

    def accepted(self, requests: int) -> list[int]:
        """Accepted drafts of each request in one step."""
        drawn = self._rng.random(requests)
        below = self._at_least[None, :] > drawn[:, None]
        accepted: list[int] = below.sum(axis=1).tolist()
        return accepted
