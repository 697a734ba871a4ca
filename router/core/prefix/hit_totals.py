"""How right the router is about what engines have cached of their prompts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HitTotals:
    """Predictions when requests were sent, beside what their engines found as they began.

    Attributes:
        requests: those that were compared.
        right: those of them where both numbers were equal.
        prompt_tokens: all tokens of their prompts.
        predicted_tokens: cached prompt tokens, by the router.
        found_tokens: the same, by the engines.
        error_tokens: sum of the absolute differences.
    """

    requests: int = 0
    right: int = 0
    prompt_tokens: int = 0
    predicted_tokens: int = 0
    found_tokens: int = 0
    error_tokens: int = 0

    def plus(self, prompt_tokens: int, predicted_tokens: int, found_tokens: int) -> HitTotals:
        """With one more request."""
        error = abs(predicted_tokens - found_tokens)
        return HitTotals(
            self.requests + 1,
            self.right + (not error),
            self.prompt_tokens + prompt_tokens,
            self.predicted_tokens + predicted_tokens,
            self.found_tokens + found_tokens,
            self.error_tokens + error,
        )


class HitRecord:
    """The totals of a group, which its workers add to."""

    def __init__(self) -> None:
        self.totals = HitTotals()

    def compare(self, prompt_tokens: int, predicted_tokens: int, found_tokens: int) -> None:
        self.totals = self.totals.plus(prompt_tokens, predicted_tokens, found_tokens)
