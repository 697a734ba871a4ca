"""Memory use at the predicted ends of requests.

Without entries the memory use never falls between two ends, because each request grows. So its
maxima are at the ends, and only these need checking (arXiv 2502.07115, section 4). The sums are
updated as requests come and go, each by one pass over the running ones.

Requests with the same prompt prefix share its blocks, until the last of them ends. So each block
counts for that one only: a request counts without the longest prefix that it shares with any
request that ends later.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence

import numpy as np

from engine_patches.admission.ledger import Memory, Ticket
from router.core.forecast.forecast import Ints
from router.core.kv_blocks import KvBlocks

_OFFSETS, _ENDS, _HELD, _SHARED = range(4)
_NOTHING: Ints = np.zeros(0, dtype=np.int64)


class Completions:
    """Running requests by their ends, and the blocks held at each end.

    A booked request counts as running until ``settle``, or permanently if it enters before.
    """

    def __init__(self) -> None:
        self._size: tuple[int, KvBlocks, int] | None = None
        self._kv = KvBlocks.plain()
        self._hashed_tokens = 0
        self._capacity_tokens = 1 << 60
        self._tickets: list[Ticket] = []
        self._ends: list[int] = []
        self._table = np.zeros((4, 0), dtype=np.int64)
        self._start = 0  # column of the first to end
        self._booked: dict[str, tuple[Ticket, int]] = {}
        self._fullest = 0  # end at which the last refused one did not fit
        self._families: Counter[Hashable] = Counter()  # by the hash of their first block
        # The one that ends later and shares most, of each with a prefix.
        self._sources: dict[Ticket, Ticket | None] = {}

    def fit(self, memory: Memory) -> None:
        """Set the size of the memory; no request is assumed to outgrow it."""
        size = memory.capacity_blocks, memory.kv, memory.hashed_tokens
        if size == self._size:
            return
        self.settle()
        self._size = size
        _, self._kv, self._hashed_tokens = size
        self._capacity_tokens = memory.capacity_tokens
        tickets, self._tickets, self._ends = self._tickets, [], []
        self._families.clear()
        self._sources.clear()
        for ticket in tickets:
            self._add(ticket, ticket.offset_tokens)

    def gained(self, ticket: Ticket) -> None:
        if self._booked.get(ticket.id) == (ticket, ticket.offset_tokens):
            del self._booked[ticket.id]
            if not ticket.prefix:
                return
            # Only now is it known what the engine has found of its prompt.
            self._remove(ticket, ticket.offset_tokens)
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
        if place == len(self._ends) or self._ends[place] != self._fullest or self._related(ticket):
            return False
        blocks = int(self._table[_HELD, self._start + place])
        if self._fullest <= self._end(ticket, offset):
            blocks += self._kv.held(offset + self._fullest)
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
        held = self._kv.each_held(self._row(_OFFSETS) + step)
        return int(np.add.reduce(held) - np.add.reduce(self._row(_SHARED)))

    def surpassed(self, step: int) -> list[Ticket]:
        """Requests predicted to have ended before a step."""
        return self._tickets[: bisect_left(self._ends, step)]

    def _row(self, row: int, first: int = 0, until: int | None = None) -> Ints:
        """Offsets, ends, blocks held at the ends, or shared with later ones, by ends."""
        last = len(self._ends) if until is None else until
        return self._table[row, self._start + first : self._start + last]

    def _add(self, ticket: Ticket, offset: int, limit_blocks: int | None = None) -> bool:
        end = self._end(ticket, offset)
        place = bisect_right(self._ends, end)
        alive = bisect_left(self._ends, end, hi=place)
        at_end = int(np.add.reduce(self._kv.each_held(self._row(_OFFSETS, alive) + end)))
        at_end += self._kv.held(offset + end) - int(np.add.reduce(self._row(_SHARED, alive)))
        before = self._row(_HELD, until=place)
        grown = before + self._kv.each_held(self._row(_ENDS, until=place) + offset)
        shared, released, source = 0, _NOTHING, None
        if self._related(ticket):
            shared, released, source = self._sharing(ticket, place)
            at_end -= shared + int(np.add.reduce(released[alive:]))
            grown -= shared + self._until_each(released)
        if limit_blocks is not None and (
            at_end > limit_blocks
            or self._over(limit_blocks, grown)
            or self._over(limit_blocks, self._row(_HELD, place), place)
        ):
            return False
        before[:] = grown
        self._row(_SHARED, until=len(released))[:] += released
        for at in released.nonzero()[0].tolist():
            self._sources[self._tickets[at]] = ticket
        self._open(place)
        self._table[:, self._start + place] = offset, end, at_end, shared
        self._ends.insert(place, end)
        self._tickets.insert(place, ticket)
        if ticket.prefix:
            self._families[ticket.prefix[0]] += 1
            self._sources[ticket] = source
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
        place = self._tickets.index(ticket, first)
        until = bisect_right(self._ends, end, lo=first)
        at, behind = self._start + place, self._start + len(self._ends)
        if until > 1:
            held = self._row(_HELD, until=until)
            held -= self._kv.each_held(self._row(_ENDS, until=until) + offset)
            held += self._table[_SHARED, at]
        if place == 0:
            self._start += 1
        else:
            self._table[:, at : behind - 1] = self._table[:, at + 1 : behind]
        del self._ends[place], self._tickets[place]
        if ticket.prefix:
            del self._sources[ticket]
            self._families[ticket.prefix[0]] -= 1
            if self._related(ticket):
                self._inherit(ticket, until - 1)
            else:
                del self._families[ticket.prefix[0]]

    def _related(self, ticket: Ticket) -> bool:
        """Whether a request here may share blocks with it."""
        return bool(ticket.prefix) and self._families[ticket.prefix[0]] > 0

    def _family(self, ticket: Ticket, first: int, until: int) -> Iterator[tuple[int, Ticket]]:
        """Requests whose prompts begin with the same block, with their places."""
        for place in range(first, until):
            one = self._tickets[place]
            if one.prefix and one.prefix[0] == ticket.prefix[0]:
                yield place, one

    def _sharing(self, ticket: Ticket, place: int) -> tuple[int, Ints, Ticket | None]:
        """What a request at this place shares with those that end later, and earlier ones with it.

        Its blocks that one of the later ones has, those of each earlier one that only this one has
        too, and that later one.
        """
        shared, source = self._most_shared(ticket, place)
        released = np.zeros(place, dtype=np.int64)
        before = self._row(_SHARED)
        for at, one in self._family(ticket, 0, place):
            released[at] = max(0, self._common(one, ticket) - int(before[at]))
        return shared, released, source

    def _inherit(self, gone: Ticket, until: int) -> None:
        """Count what others shared with a request that has gone for the last of them to end."""
        shared = self._row(_SHARED)
        back = np.zeros(until, dtype=np.int64)
        for at, one in self._family(gone, 0, until):
            if self._sources[one] is gone:
                blocks, self._sources[one] = self._most_shared(one, at + 1, int(shared[at]))
                back[at] = shared[at] - blocks
        shared[:until] -= back
        self._row(_HELD, until=until)[:] += self._until_each(back)

    def _until_each(self, blocks: Ints) -> Ints:
        """Sum at each end of what those count that have not ended before it."""
        ends = self._row(_ENDS, until=len(blocks))
        behind = np.cumsum(blocks[::-1])[::-1]
        return behind[np.searchsorted(ends, ends)]

    def _most_shared(
        self, ticket: Ticket, first: int, enough: int = 1 << 60
    ) -> tuple[int, Ticket | None]:
        """Most blocks shared with a request from a place on, and that request."""
        most, source = 0, None
        for _, one in self._family(ticket, first, len(self._ends)):
            common = self._common(one, ticket)
            if common > most:
                most, source = common, one
                if most >= enough:
                    break
        return most, source

    def _common(self, one: Ticket, other: Ticket) -> int:
        """Blocks that two requests share: those of one, found by the other as it entered.

        Of two that wait, ``other`` enters later.
        """
        first, later = one, other
        if later.entry and not 0 < first.entry < later.entry:
            first, later = later, first
        # The last token is always computed.
        most = later.cached_tokens if later.entry else later.entry_tokens - 1
        tokens = _equal(first.prefix, later.prefix) * self._hashed_tokens
        return self._kv.shared(min(tokens, most, self._offered(first)))

    def _offered(self, ticket: Ticket) -> int:
        """Prompt tokens whose blocks another request finds with this one."""
        if not ticket.entry:
            return 0 if ticket.late_steps else ticket.entry_tokens - 1
        if ticket.cached_tokens + self._hashed_tokens >= ticket.entry_tokens:
            return ticket.cached_tokens  # its last block may be a copy, computed for the last token
        return ticket.entry_tokens - ticket.uncomputed_tokens

    def _open(self, place: int) -> None:
        count = len(self._ends)
        if self._start + count == self._table.shape[1]:
            columns = self._table[:, self._start : self._start + count]
            self._table = np.zeros((4, 2 * count + 64), dtype=np.int64)
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


def _equal(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """Number of equal hashes at the start; if one is equal, all before it are."""
    most = min(len(one), len(other))
    if most and one[most - 1] == other[most - 1]:
        return most
    return bisect_left(range(most), True, key=lambda at: one[at] != other[at])
