"""Bytes of text per token, learned from prompts that engines have counted."""

from __future__ import annotations

import math

# English text under common tokenizers, with the weight of a short prompt.
_BYTES_PER_TOKEN = 4.0
_PRIOR_BYTES = 400.0
# Number of prompts remembered: traffic changes over the day.
_PROMPTS = 200


class TokenRate:
    """Bytes per token of one model's prompts, chat templates included, and tokens of an image.

    It is a ratio of two sums, not a mean of ratios, so that estimates add up to the true load.
    """

    def __init__(self) -> None:
        self._bytes = _PRIOR_BYTES
        self._tokens = _PRIOR_BYTES / _BYTES_PER_TOKEN
        self._parts = self._part_tokens = 0.0

    @property
    def bytes_per_token(self) -> float:
        return self._bytes / self._tokens

    @property
    def tokens_per_part(self) -> float:
        """Tokens of an image or other media; 0 until one has been counted."""
        return self._part_tokens / self._parts if self._parts else 0.0

    def tokens(self, text_bytes: int, parts: int = 0) -> int:
        return tokens_of(text_bytes, parts, self.bytes_per_token, self.tokens_per_part)

    def learn(self, text_bytes: int, tokens: int, parts: int = 0) -> None:
        """Learn from an engine's count of a prompt.

        With images, the text's tokens are estimated, and the rest counts as the images'.
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
    """Tokens of a text with this many images at these rates."""
    return math.ceil(text_bytes / bytes_per_token + parts * tokens_per_part)
