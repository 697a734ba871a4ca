from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

import numpy as np

from engine_patches.admission.ledger import Ticket
from router.core.forecast.end_signals import REFRESH_STEPS, Departure, SurvivalSignal
from router.core.forecast.forecast import Floats, Running

MEDIAN = 0.5
REDRAW_STEPS = 4 * REFRESH_STEPS  # drawing the curves costs as much as many decisions


class SeenLengths:
    """Quantiles of lengths seen with prompts of similar size, given the tokens generated so far.

    Learns online from ended, withdrawn and running requests (``router.core.forecast.end_signals``).
    """

    def __init__(self) -> None:
        self._signal = SurvivalSignal()
        self._falls: dict[int, Floats] = {}  # survival below 0, so that it ascends

    def quantile(self, share: float, prompt_tokens: int, generated_tokens: int) -> int:
        """Length that this share of the requests that got so far does not exceed."""
        bits = prompt_tokens.bit_length()
        falls = self._falls.get(bits)
        if falls is None:
            falls = self._falls[bits] = -self._signal.survival(prompt_tokens)
        so_far = float(falls[min(generated_tokens, len(falls) - 1)])
        return max(int(falls.searchsorted(so_far * (1 - share))), generated_tokens + 1)

    def ended(self, ticket: Ticket, *, by_itself: bool) -> None:
        prompt, generated, cap = ticket.prompt_tokens, ticket.generated_tokens, ticket.cap_tokens
        self._signal.ended(Departure(0, prompt, generated, by_itself, cap))

    def stepped(self, running: Mapping[str, Ticket], steps: int) -> None:
        self._signal.advance(1)
        if steps % REDRAW_STEPS == 0 or steps in (REFRESH_STEPS, 2 * REFRESH_STEPS):
            self._signal.observe(_table(running, steps))
            self._falls.clear()


class PredictedLengths:
    """Output lengths that admission assumes.

    A client's hint holds until it is exceeded; then, or without one, a quantile of the lengths
    seen, given the request's progress. The cap is the maximum, and holds while nothing is learned.

    Args:
        seen: None: caps only.
        share: the quantile.
        hints: whether to use hints.
        margin: share added to the prediction for its error: o_hat + delta. (The o_hat - delta of
            arXiv 2502.07115, section 8.1, would fill the memory beyond C.)
        segments: lengths that separate the types, ascending; empty: tickets carry their types.
    """

    def __init__(
        self,
        seen: SeenLengths | None = None,
        *,
        share: float = MEDIAN,
        hints: bool = False,
        margin: float = 0.0,
        segments: Sequence[int] = (),
    ) -> None:
        self._seen = seen
        self._share = share
        self._hints = hints
        self._margin = margin
        self._segments = segments

    def predict(self, ticket: Ticket, generated_tokens: int) -> int:
        if self._hints and ticket.hint_tokens is not None:
            tokens = self._with_margin(ticket.hint_tokens)
            if tokens > generated_tokens:
                return min(tokens, ticket.cap_tokens)
        if self._seen is None:
            return ticket.cap_tokens
        tokens = self._seen.quantile(self._share, ticket.prompt_tokens, generated_tokens)
        return min(self._with_margin(tokens), ticket.cap_tokens)

    def kind(self, ticket: Ticket) -> int:
        """First segment that the predicted length does not exceed."""
        if not self._segments:
            return ticket.kind
        return bisect_left(self._segments, ticket.predicted_tokens)

    def ended(self, ticket: Ticket, *, by_itself: bool) -> None:
        if self._seen is not None:
            self._seen.ended(ticket, by_itself=by_itself)

    def stepped(self, running: Mapping[str, Ticket], steps: int) -> None:
        if self._seen is not None:
            self._seen.stepped(running, steps)

    def _with_margin(self, tokens: int) -> int:
        return math.ceil(tokens * (1 + self._margin))


def _table(running: Mapping[str, Ticket], steps: int) -> Running:
    rows = [(one.prompt_tokens, one.offset_tokens, one.cap_tokens) for one in running.values()]
    prompts, offsets, caps = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    sizes = offsets + steps
    nothing = np.zeros(len(prompts), dtype=np.int64)
    unknown = np.full(len(prompts), math.nan)
    return Running(nothing, nothing, prompts, sizes - prompts, caps, unknown, nothing, nothing)
