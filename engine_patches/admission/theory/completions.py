"""Memory use at the predicted ends of requests.

Without entries the memory use never falls between two ends, because each request grows. So its
maxima are at the ends, and only these need checking (arXiv 2502.07115, section 4). The sums are
updated as requests come and go, each by one pass over the running ones.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np

from engine_patches.admission.ledger import Ticket
from router.core.forecast.forecast import Ints

_OFFSETS, _ENDS, _HELD = range(3)


class Completions:
    """Running requests by their ends, and the blocks held at each end.

    A booked request counts as running until ``settle``, or permanently if it enters before.
    """

    def __init__(self) -> None:
        self._block_tokens = 1
        self._capacity_tokens = 1 << 60
        self._tickets: list[Ticket] = []
        self._ends: list[int] = []
        self._table = np.zeros((3, 0), dtype=np.int64)
        self._start = 0  # column of the first to end
        self._booked: dict[str, tuple[Ticket, int]] = {}
        self._fullest = 0  # end at which the last refused one did not fit

    def fit(self, capacity_tokens: int, block_tokens: int) -> None:
        """Set block size and capacity; no request is assumed to outgrow the memory."""
        if (capacity_tokens, block_tokens) == (self._capacity_tokens, self._block_tokens):
            return
        self.settle()
        self._capacity_tokens, self._block_tokens = capacity_tokens, block_tokens
        tickets, self._tickets, self._ends = self._tickets, [], []
        for ticket in tickets:
            self._add(ticket, ticket.offset_tokens)

    def gained(self, ticket: Ticket) -> None:
        if self._booked.get(ticket.id) == (ticket, ticket.offset_tokens):
            del self._booked[ticket.id]
        else:
            self._add(ticket, ticket.offset_tokens)

    def lost(self, ticket: Ticket) -> None:
        self._remove(ticket, ticket.offset_tokens)

    def book(self, ticket: Ticket, offset: int, limit_blocks: int) -> bool:
        """Count a candidate in, unless the limit would be exceeded at any end.

        ``offset``: its size less the number of steps, as if it entered now.
        """
        if not self._add(ticket, offset, limit_blocks):
            return False
        self._booked[ticket.id] = ticket, offset
        return True

    def refuses(self, ticket: Ticket, offset: int, limit_blocks: int) -> bool:
        """Check cheaply whether ``book`` will refuse, at the end where the last one did not fit."""
        place = bisect_left(self._ends, self._fullest)
        if place == len(self._ends) or self._ends[place] != self._fullest:
            return False
        blocks = int(self._table[_HELD, self._start + place])
        if self._fullest <= self._end(ticket, offset):
            blocks += -(-(offset + self._fullest) // self._block_tokens)
        return blocks > limit_blocks

    def settle(self) -> None:
        """Remove booked requests that have not entered."""
        for ticket, offset in self._booked.values():
            self._remove(ticket, offset)
        self._booked.clear()

    def highest_blocks(self) -> int:
        return int(self._row(_HELD).max(initial=0))

    def held_blocks(self, step: int) -> int:
        """Blocks held in a step before which none has ended."""
        return int(np.add.reduce(self._blocks(self._row(_OFFSETS), step)))

    def surpassed(self, step: int) -> list[Ticket]:
        """Requests predicted to have ended before a step."""
        return self._tickets[: bisect_left(self._ends, step)]

    def _row(self, row: int, first: int = 0, until: int | None = None) -> Ints:
        """Offsets, ends, or blocks held at the ends, the first to end first."""
        last = len(self._ends) if until is None else until
        return self._table[row, self._start + first : self._start + last]

    def _add(self, ticket: Ticket, offset: int, limit_blocks: int | None = None) -> bool:
        end = self._end(ticket, offset)
        place = bisect_right(self._ends, end)
        alive = bisect_left(self._ends, end, hi=place)
        at_end = int(np.add.reduce(self._blocks(self._row(_OFFSETS, alive), end)))
        at_end += -(-(offset + end) // self._block_tokens)
        before = self._row(_HELD, until=place)
        grown = before + self._blocks(self._row(_ENDS, until=place), offset)
        if limit_blocks is not None and (
            at_end > limit_blocks
            or self._over(limit_blocks, grown)
            or self._over(limit_blocks, self._row(_HELD, place), place)
        ):
            return False
        before[:] = grown
        self._open(place)
        self._table[:, self._start + place] = offset, end, at_end
        self._ends.insert(place, end)
        self._tickets.insert(place, ticket)
        return True

    def _over(self, limit_blocks: int, held: Ints, first: int = 0) -> bool:
        fullest = int(held.argmax()) if len(held) else -1
        if fullest < 0 or held[fullest] <= limit_blocks:
            return False
        self._fullest = self._ends[first + fullest]
        return True

    def _remove(self, ticket: Ticket, offset: int) -> None:
        end = self._end(ticket, offset)
        first = bisect_left(self._ends, end)
        until = bisect_right(self._ends, end, lo=first)
        if until > 1:
            held = self._row(_HELD, until=until)
            held -= self._blocks(self._row(_ENDS, until=until), offset)
        place = self._tickets.index(ticket, first)
        at, behind = self._start + place, self._start + len(self._ends)
        if place == 0:
            self._start += 1
        else:
            self._table[:, at : behind - 1] = self._table[:, at + 1 : behind]
        del self._ends[place], self._tickets[place]

    def _open(self, place: int) -> None:
        count = len(self._ends)
        if self._start + count == self._table.shape[1]:
            columns = self._table[:, self._start : self._start + count]
            self._table = np.zeros((3, 2 * count + 64), dtype=np.int64)
            self._table[:, :count] = columns
            self._start = 0
        at, behind = self._start + place, self._start + count
        self._table[:, at + 1 : behind + 1] = self._table[:, at:behind]

    def _end(self, ticket: Ticket, offset: int) -> int:
        # A prompt that takes more steps only makes its request smaller at a time, and end later.
        steps = ticket.predicted_tokens + ticket.late_steps - 1
        tokens = min(ticket.prompt_tokens + steps, self._capacity_tokens)
        # An engine may have more memory than known: a request that enters beyond it keeps its size.
        return max(tokens, ticket.entry_tokens) - offset

    def _blocks(self, tokens: Ints, more: int) -> Ints:
        return (tokens + (more + self._block_tokens - 1)) // self._block_tokens
