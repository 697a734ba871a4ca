"""How many bytes of text make a token: learned from the prompts that engines have counted."""

from __future__ import annotations

import math

# English text under common tokenizers, worth a short prompt's evidence.
_BYTES_PER_TOKEN = 4.0
_PRIOR_BYTES = 400.0
# So many prompts are remembered: what a deployment is asked changes over the day.
_PROMPTS = 200


class TokenRate:
    """Bytes per token of one model's prompts, chat templates included; tokens of an image, too.

    The ratio of two sums rather than a mean of ratios: estimates add up to the true load.
    """

    def __init__(self) -> None:
        self._bytes = _PRIOR_BYTES
        self._tokens = _PRIOR_BYTES / _BYTES_PER_TOKEN
        self._parts = self._part_tokens = 0.0

    @property
    def bytes_per_token(self) -> float:
        """What holds now."""
        return self._bytes / self._tokens

    @property
    def tokens_per_part(self) -> float:
        """Of an image or the like, 0 until one has been counted."""
        return self._part_tokens / self._parts if self._parts else 0.0

    def tokens(self, text_bytes: int, parts: int = 0) -> int:
        """What a text, with so many images, comes to, by estimate."""
        return tokens_of(text_bytes, parts, self.bytes_per_token, self.tokens_per_part)

    def learn(self, text_bytes: int, tokens: int, parts: int = 0) -> None:
        """An engine has counted so many tokens in a prompt of so much text, and so many images.

        What the text of a prompt with images comes to is an estimate: the rest are the images.
        """
        kept = 1 - 1 / _PROMPTS
        if parts > 0:
            left = max(0.0, tokens - text_bytes / self.bytes_per_token)
            self._parts = kept * self._parts + parts
            self._part_tokens = kept * self._part_tokens + left
        elif text_bytes > 0 and tokens > 0:
            self._bytes = kept * self._bytes + text_bytes
            self._tokens = kept * self._tokens + tokens


def tokens_of(text_bytes: int, parts: int, bytes_per_token: float, tokens_per_part: float) -> int:
    """What a text, with so many images, comes to at these rates."""
    return math.ceil(text_bytes / bytes_per_token + parts * tokens_per_part)
