"""How soon tokens are wanted: of a group on the mean, or of a single request."""

import math
from dataclasses import dataclass
from typing import Literal

from router.core.errors import ConfigError

# Of a request with targets: it met them, or what made it miss them.
Verdict = Literal["met", "refused", "queue", "prompt", "tokens", "failed"]


@dataclass(frozen=True, slots=True)
class Targets:
    """Times that users wait, in seconds; None: no target.

    Attributes:
        ttft_s: from the arrival of a request to its first token.
        tpot_s: for each token after the first.

    Raises:
        ConfigError: one is not above 0; names the setting.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("target_ttft", self.ttft_s), ("target_tpot", self.tpot_s)):
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} takes seconds above 0, got {value:g}")

    def verdict(self, queued_s: float, ttft_s: float, tpot_s: float | None) -> Verdict:
        """Of a stream. ``queued_s``: part of ``ttft_s`` in which it waited in the router.

        The queue is to blame only for what would have been in time without it.
        """
        if self.ttft_s is not None and ttft_s > self.ttft_s:
            return "queue" if ttft_s - queued_s <= self.ttft_s else "prompt"
        late = self.tpot_s is not None and tpot_s is not None and tpot_s > self.tpot_s
        return "tokens" if late else "met"

    def verdict_whole(self, queued_s: float, took_s: float, tokens: float) -> Verdict | None:
        """Of an answer that came whole: by its last token; None without both targets."""
        if self.ttft_s is None or self.tpot_s is None:
            return None
        late_s = took_s - self.ttft_s - self.tpot_s * (tokens - 1)
        return "met" if late_s <= 0 else "queue" if late_s <= queued_s else "tokens"
