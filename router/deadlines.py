"""How long a request may take: as a whole, to its first byte, and between two bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Times in seconds; None: as long as it likes.

    Attributes:
        request_s: from its arrival to the end of its answer.
        first_byte_s: from its being sent to a worker to the first byte of the answer, which a whole
            answer's is at its end.
        idle_s: silence of a worker in the midst of a stream.
    """

    request_s: float | None = None
    first_byte_s: float | None = None
    idle_s: float | None = None

    def within(self, request_s: float | None) -> Deadlines:
        """The same for a request whose client asks for an answer in so much time, if it does."""
        if request_s is None:
            return self
        return replace(self, request_s=shorter(self.request_s, request_s))


def shorter(one_s: float | None, other_s: float | None) -> float | None:
    """The time that ends first; None: none that ends."""
    given = [time_s for time_s in (one_s, other_s) if time_s is not None]
    return min(given, default=None)
