"""Future memory use of requests of unknown lengths, with a safety buffer.

The buffer is Nested WAIT's (arXiv 2504.11320): a level n plus ln(1 / delta) / theta, where theta
solves (20) for that level, e^(-theta n) E[e^(theta Y)] = 1. The paper fixes n, solves for theta
segment by segment and sums the buffers. Here Y is the memory in tokens of all requests that still
run. Theta is chosen to make level plus buffer about minimal, and n follows.
"""

import math
from collections.abc import Sequence

import numpy as np

from engine_patches.admission.ledger import Ledger, Memory, Ticket
from engine_patches.admission.theory.passing import Passing
from router.core.forecast.forecast import Floats

_TINY = 1e-9


class Outlook:
    """Memory that running requests will leave free, 0, 1, 2, 4, … steps from now.

    It stays valid for a while: expected ends are included, and new entries are added by ``take``.

    Args:
        delta: probability that they need more at one of the steps.
        next_: a candidate; the bounds are chosen to suit requests like it too.
    """

    def __init__(
        self, passing: Passing, ledger: Ledger, memory: Memory, delta: float, next_: Ticket
    ) -> None:
        self._odds = -math.log(delta)
        self._cap_tokens = max(t.cap_tokens for t in (next_, *ledger.running.values()))
        last = (self._cap_tokens - 1).bit_length()
        self._steps = np.array([0.0, *(2.0**k for k in range(last))])
        counts, ages, sizes = _by_segment(passing.segments, ledger)
        self._log_alive = passing.log_alive(counts[::-1].cumsum()[-2::-1])
        self._new: Floats = self._alive(np.zeros(1))[0]
        divisor = np.maximum(counts, 1.0)
        alive = self._alive(ages / divisor)
        tokens = (sizes / divisor)[:, None] + self._steps
        self._theta = self._chosen(counts @ (alive * (1 - alive) * tokens**2), tokens, next_)
        needed = counts @ _level(alive, self._theta * tokens) + self._odds
        left = memory.capacity_tokens - (memory.used_tokens - sizes.sum())
        self._free = left - needed / self._theta
        self._sure = left - counts @ tokens
        self._free[counts @ alive + self._new <= delta] = np.inf  # no request is likely to be left
        self._room: int | None = None
        self._taken: list[tuple[Ticket, Floats, Floats]] = []

    @property
    def room(self) -> int:
        """Tokens with which a request may enter that has generated none."""
        if self._room is None:
            self._room = self._room_for(self._new)
        return self._room

    def room_at(self, generated_tokens: int) -> int:
        """The same for a preempted request that has generated this many."""
        return self._room_for(self._alive_from(generated_tokens))

    def take(self, ticket: Ticket, tokens: int) -> None:
        """Reserve memory for a request that may enter with these tokens."""
        alive = self._alive_from(ticket.generated_tokens)
        grown = tokens + self._steps
        level = _level(alive, self._theta * grown) / self._theta
        self._free -= level
        self._sure -= grown
        self._room = None
        self._taken.append((ticket, level, grown))

    def settle(self) -> None:
        """Release the reservations of requests that have not entered, and may be gone."""
        for ticket, level, grown in self._taken:
            if not ticket.entry:
                self._free += level
                self._sure += grown
                self._room = None
        self._taken.clear()

    def _room_for(self, alive: Floats) -> int:
        # Inverse of ln(1 - q + q e^(theta z)) / theta, the level of a request with z tokens.
        free = self._theta * np.maximum(self._free, 0.0)
        most = free - np.log(alive) + np.log1p((alive - 1) * np.exp(-free))
        tokens = np.maximum(most / self._theta, self._sure)  # never more than if all stay
        return max(0, int((tokens - self._steps).min()))

    def _alive_from(self, generated_tokens: int) -> Floats:
        if not generated_tokens:
            return self._new
        return self._alive(np.array([float(generated_tokens)])).ravel()

    def _alive(self, ages: Floats) -> Floats:
        """Shares q that still run, for requests of these ages; shape (ages, steps)."""
        then = ages[:, None] + self._steps
        log_alive = self._log_alive(then)
        alive = np.maximum(np.exp(log_alive - log_alive[:, :1]), _TINY)
        alive[then >= self._cap_tokens] = _TINY
        return alive

    def _chosen(self, variance: Floats, tokens: Floats, next_: Ticket) -> Floats:
        """Theta, per token, for each step; any value above 0 is safe."""
        next_tokens = next_.entry_tokens + self._steps
        variance = variance + self._new * (1 - self._new) * next_tokens**2
        largest = np.maximum(tokens.max(axis=0), next_tokens)
        rarity = self._odds * largest**2 / np.maximum(variance, _TINY)
        # If all were of that size, the optimum x = theta * largest would solve (x - 1) e^x = rarity
        # - 1.
        chosen: Floats = np.log1p(rarity + np.sqrt(2 * rarity)) / largest
        return chosen


def _level(alive: Floats, exponent: Floats) -> Floats:
    """ln(1 - q + q e^x), stable for any x >= 0."""
    level: Floats = exponent + np.log(alive + (1 - alive) * np.exp(-exponent))
    return level


def _by_segment(segments: Sequence[int], ledger: Ledger) -> tuple[Floats, Floats, Floats]:
    """Per segment: number of running requests, sum of their ages, sum of their sizes."""
    tickets = ledger.running.values()
    sizes = np.array([ticket.offset_tokens for ticket in tickets], dtype=np.float64) + ledger.steps
    ages = sizes - np.array([ticket.prompt_tokens for ticket in tickets], dtype=np.float64)
    places = np.searchsorted(segments, ages, side="right")

    def sums(values: Floats) -> Floats:
        return np.bincount(places, values, len(segments) + 1).astype(np.float64, copy=False)

    return sums(np.ones(len(ages))), sums(ages), sums(sizes)
