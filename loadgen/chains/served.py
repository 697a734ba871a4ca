"""Times of simulated requests."""

from __future__ import annotations

from dataclasses import dataclass

from router.core.forecast.forecast import Floats


@dataclass(frozen=True, slots=True)
class Served:
    """Times of each request, in the order of arrival.

    Attributes:
        waiting_s: shape (R,), from arrival to start.
        service_s: shape (R,), from start to end.
    """

    waiting_s: Floats
    service_s: Floats

    @property
    def response_s(self) -> Floats:
        """Shape (R,), from arrival to end."""
        return self.waiting_s + self.service_s

    def after(self, warmup: int) -> Served:
        """The times without those of the first requests."""
        return Served(self.waiting_s[warmup:], self.service_s[warmup:])
