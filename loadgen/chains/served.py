"""What became of requests."""

from __future__ import annotations

from dataclasses import dataclass

from router.core.forecast.step_cost import Floats


@dataclass(frozen=True, slots=True)
class Served:
    """Times of each request, in the order of arrival.

    Attributes:
        waiting_s: shape (R,), from its arrival to its beginning.
        service_s: shape (R,), from its beginning to its end.
    """

    waiting_s: Floats
    service_s: Floats

    @property
    def response_s(self) -> Floats:
        """Shape (R,), from its arrival to its end."""
        return self.waiting_s + self.service_s

    def after(self, warmup: int) -> Served:
        """Without the first ones."""
        return Served(self.waiting_s[warmup:], self.service_s[warmup:])
