"""How many bytes of text make a token: learned from the prompts that engines have counted."""

from __future__ import annotations

import math

# English text under common tokenizers, worth a short prompt's evidence.
_BYTES_PER_TOKEN = 4.0
_PRIOR_BYTES = 400.0
# So many prompts are remembered: what a deployment is asked changes over the day.
_PROMPTS = 200


class TokenRate:
    """Bytes per token of one model's prompts, chat templates included.

    The ratio of two sums rather than a mean of ratios: estimates add up to the true load.
    """

    def __init__(self) -> None:
        self._bytes = _PRIOR_BYTES
        self._tokens = _PRIOR_BYTES / _BYTES_PER_TOKEN

    @property
    def bytes_per_token(self) -> float:
        """What holds now."""
        return self._bytes / self._tokens

    def tokens(self, text_bytes: int) -> int:
        """What a text comes to, by estimate."""
        return math.ceil(text_bytes / self.bytes_per_token)

    def learn(self, text_bytes: int, tokens: int) -> None:
        """An engine has counted so many tokens in a prompt of so much text; nothing of no text."""
        if text_bytes > 0 and tokens > 0:
            kept = 1 - 1 / _PROMPTS
            self._bytes = kept * self._bytes + text_bytes
            self._tokens = kept * self._tokens + tokens
