"""Shares of requests that pass from one output length segment to the next, learned from ends.

Nested WAIT (arXiv 2504.11320, section 5) predicts no single length. It knows each request's
progress, and for each segment only the share p_k that passes to the next.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np

from engine_patches.admission.ledger import Ticket
from router.core.forecast.forecast import Floats

SEGMENTS = tuple(2**k for k in range(15))

# Number of ends after which an end's weight is 1 / e, and prior passes.
_MEMORY_ENDS = 1000
_PRIOR = 2.0
_PRIOR_SHARE = 0.5
_LEAST_SHARE = 1e-9
_FAR = 10**7


class Passing:
    """The shares p_k; as a ledger's lengths it returns caps, since nothing is predicted.

    Args:
        segments: output lengths at which the segments end, ascending; one more without an end
            follows.
        shares: constant p_k of each of these; empty: learned.
    """

    def __init__(self, segments: Sequence[int], shares: Sequence[float] = ()) -> None:
        self.segments = tuple(segments)
        self._given = tuple(shares)
        self._ended = np.zeros(len(segments))
        self._passed = np.zeros(len(segments))
        self._ends = np.array([0.0, *segments, _FAR])

    def predict(self, ticket: Ticket, generated_tokens: int) -> int:
        return ticket.cap_tokens

    def kind(self, ticket: Ticket) -> int:
        return ticket.kind

    def stepped(self, running: Mapping[str, Ticket], steps: int) -> None:
        """There is nothing to learn."""

    def ended(self, ticket: Ticket, *, by_itself: bool) -> None:
        """Count a pass of all segments before its own; in its own an end, unless it was cut off."""
        tokens = ticket.generated_tokens
        fade = 1 - 1 / _MEMORY_ENDS
        self._ended *= fade
        self._passed *= fade
        if not by_itself or tokens >= ticket.cap_tokens:
            self._passed[: bisect_right(self.segments, tokens)] += 1
            return
        place = bisect_left(self.segments, tokens)
        self._passed[:place] += 1
        if place < len(self._ended):
            self._ended[place] += 1

    def log_alive(self, running_beyond: Floats) -> Callable[[Floats], Floats]:
        """Survival as far as known: ln of the share of all requests that reach each length.

        Ends are even within a segment. The number that run beyond each segment but the last, shape
        (segments,), counts as passes.
        """
        if self._given:
            shares = np.array(self._given)
        else:
            passed = self._passed + running_beyond
            shares = (passed + _PRIOR * _PRIOR_SHARE) / (passed + self._ended + _PRIOR)
        steepness = np.log(np.maximum(shares, _LEAST_SHARE))
        falls = np.zeros(len(self._ends))
        falls[1:-1] = steepness.cumsum()
        # Beyond the last end as within the segment before it.
        width = self._ends[-2] - self._ends[-3]
        falls[-1] = falls[-2] + steepness[-1] / width * (_FAR - self._ends[-2])
        return lambda generated: np.interp(generated, self._ends, falls)


def passing_shares(rates: Sequence[float]) -> list[float]:
    """Share of each segment's requests, but the last's, that pass to the next."""
    tails = list(accumulate(reversed(rates)))[::-1]
    return [after / before for before, after in pairwise(tails)]
