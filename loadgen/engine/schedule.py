"""What a step of an emulated engine computes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schedule:
    """Plan of a step at its start.

    Attributes:
        prefill_tokens: tokens computed for prompts and for requests that return.
        decode_tokens: decoding requests, one token each.
        failed: ids of requests that ended because their fetch failed.
        wake_s: time of the next schedule if there is nothing to compute; None: at the next event.
    """

    admitted: tuple[str, ...]
    preempted: tuple[str, ...]
    prefill_tokens: int
    decode_tokens: int
    failed: tuple[str, ...] = ()
    wake_s: float | None = None

    @property
    def empty(self) -> bool:
        """True if it computes nothing and changed no request."""
        computed = self.prefill_tokens or self.decode_tokens
        return not (computed or self.preempted or self.failed)


class Budget:
    """Token budget of a step, and what the step computes."""

    def __init__(self, tokens: int) -> None:
        self.left = tokens
        self.prefill_tokens = 0
        self.decode_tokens = 0

    def decode(self, requests: int) -> None:
        self.decode_tokens += requests
        self.left -= requests

    def prefill(self, prompt_tokens: int) -> int:
        """Compute as much of a prompt as fits; return the tokens left."""
        tokens = min(self.left, prompt_tokens)
        self.prefill_tokens += tokens
        self.left -= tokens
        return prompt_tokens - tokens
