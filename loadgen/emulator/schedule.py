"""What a step of an emulated engine computes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schedule:
    """What a step begins with.

    Attributes:
        prefill_tokens: tokens computed of prompts, and of requests that return.
        decode_tokens: requests that go on, one token each.
        failed: requests that ended because their KV could not be fetched.
        wake_s: when to schedule again if there is nothing to compute; None: when anything happens.
    """

    admitted: tuple[str, ...]
    preempted: tuple[str, ...]
    prefill_tokens: int
    decode_tokens: int
    failed: tuple[str, ...] = ()
    wake_s: float | None = None

    @property
    def empty(self) -> bool:
        """Nothing is computed, and nothing happened to anybody."""
        computed = self.prefill_tokens or self.decode_tokens
        return not (computed or self.preempted or self.failed)


class Budget:
    """Tokens that a step may still compute, and what it computes."""

    def __init__(self, tokens: int) -> None:
        self.left = tokens
        self.prefill_tokens = 0
        self.decode_tokens = 0

    def decode(self, requests: int) -> None:
        """Compute the next token of so many requests."""
        self.decode_tokens += requests
        self.left -= requests

    def prefill(self, prompt_tokens: int) -> int:
        """Compute of what is left of a prompt as much as it goes; returns what is left then."""
        tokens = min(self.left, prompt_tokens)
        self.prefill_tokens += tokens
        self.left -= tokens
        return prompt_tokens - tokens
