"""How soon tokens are wanted: of a group on the mean, or of a single request."""

import math
from dataclasses import dataclass

from router.core.errors import ConfigError


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
