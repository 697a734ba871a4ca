from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Time limits of a request in seconds; None: unlimited.

    Attributes:
        request_s: time from its arrival to the end of its answer.
        first_byte_s: time from dispatch to the answer's first byte; a whole answer counts at its
            end.
        idle_s: silence of a worker within a stream.
    """

    request_s: float | None = None
    first_byte_s: float | None = None
    idle_s: float | None = None

    def within(self, request_s: float | None) -> Deadlines:
        """These limits with the client's own limit on the whole request, if it has one."""
        if request_s is None:
            return self
        return replace(self, request_s=shorter(self.request_s, request_s))


def shorter(one_s: float | None, other_s: float | None) -> float | None:
    """The shorter limit; None: unlimited."""
    given = [time_s for time_s in (one_s, other_s) if time_s is not None]
    return min(given, default=None)
