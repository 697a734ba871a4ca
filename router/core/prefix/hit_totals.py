"""How right the router is about what engines have cached of their prompts."""

from dataclasses import dataclass


@dataclass(slots=True)
class HitTotals:
    """Predictions when a group's requests were sent, beside what engines found as they began.

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

    def compare(self, prompt_tokens: int, predicted_tokens: int, found_tokens: int) -> None:
        """Add a request."""
        self.requests += 1
        self.right += predicted_tokens == found_tokens
        self.prompt_tokens += prompt_tokens
        self.predicted_tokens += predicted_tokens
        self.found_tokens += found_tokens
        self.error_tokens += abs(predicted_tokens - found_tokens)
