"""Power of workers that step together (arXiv 2601.17855)."""

from dataclasses import dataclass
from typing import TypeVar

from router.core.forecast.forecast import Floats

Share = TypeVar("Share", float, Floats)


@dataclass(frozen=True, slots=True)
class PowerModel:
    """Power of one worker by its utilization u = L_g / max L (arXiv 2601.17855)."""

    idle_w: float = 100.0
    max_w: float = 400.0
    exponent: float = 0.7

    def watts(self, utilization: Share) -> Share:
        """``P_idle + (P_max - P_idle) * u ** exponent``; u is from 0 to 1."""
        watts: Share = self.idle_w + (self.max_w - self.idle_w) * utilization**self.exponent
        return watts
