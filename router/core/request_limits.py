from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of one request.

    Attributes:
        max_slots: number of engine requests that it becomes: prompts times ``n``.
        max_messages: number of messages of a chat, and of parts of messages.
    """

    max_slots: int = 1_024
    max_messages: int = 8_192


DEFAULT_LIMITS = RequestLimits()
