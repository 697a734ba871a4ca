"""Nested WAIT, live: memory for what runs as it goes from segment to segment (arXiv 2504.11320).

Output lengths are unknown, and of each segment of lengths only the share is known that passes to
the next. As printed (``strict.py``), requests wait before a segment until n_k of them do, and the
memory must hold full batches of every stage: at usual rates, where about one request arrives in a
step, ten to a hundred times M*. Here requests that run always go on, n_1 enter in a step at most,
and a request enters if then those inside will fit with their safety buffer (``outlook.py``).

The buffer goes with the square root of the number of requests that the memory holds. Of a few it
asks about as much as if all went on; there a larger delta suits better.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine_patches.admission.ledger import Key, Ledger, Memory, Ticket, engine_order
from engine_patches.admission.outlook import Outlook
from engine_patches.admission.passing import Passing
from engine_patches.admission.policy import Verdict
from engine_patches.admission.wait import Pace

# An outlook costs more than a step may; so it serves several, as long as few have left.
_OUTLOOK_STEPS = 8
_OUTLOOK_ENDS = 1 / 8


class NestedWait:
    """Who fits with what those inside will come to, n_1 in a step at most.

    Args:
        passing: of the segments.
        entries: n_1; None: measured, as ``wait`` does.
        delta: probability with which those inside may need more memory than there is.
    """

    name = "nested_wait"
    follower = None

    def __init__(self, passing: Passing, entries: int | None = None, delta: float = 0.1) -> None:
        self.lengths = passing
        self._entries = entries
        self._delta = delta
        self._pace = Pace()
        self._last: _Look | None = None
        self._asked: _Look | None = None

    def key(self, ticket: Ticket) -> Key:
        """As the engine."""
        return engine_order(ticket)

    def threshold(self, ledger: Ledger) -> int:
        """n_1, at which (12) holds, n_1 / lambda > a step, and what has piled up drains."""
        return self._entries or self._pace.entries(ledger.arrivals)

    def admit(self, ledger: Ledger, memory: Memory, now_s: float) -> Verdict:
        """In the engine's order, up to the first that will not surely fit."""
        self._pace.see(ledger, now_s)
        most = min(memory.slots_free, self.threshold(ledger))
        if not ledger.waiting or most <= 0:
            return Verdict(())
        self._last = look = self._looked(self._last, ledger, memory, ledger.waiting[0])
        outlook = look.outlook
        outlook.settle(ledger.by_id())
        now = memory.room(memory.capacity_tokens)
        admitted: list[Ticket] = []
        for ticket in ledger.waiting[:most]:
            tokens = memory.rounded(ticket.entry_tokens)
            alone = not (ledger.running or admitted)
            if tokens > now or not (alone or _fits(outlook, ticket, tokens)):
                break
            outlook.take(ticket, tokens)
            now -= tokens
            admitted.append(ticket)
        return Verdict(admitted)

    def admissible_tokens(self, ledger: Ledger, memory: Memory) -> int:
        """What is left for those inside to come to; in an empty engine, all.

        While nobody waits nothing is decided, and the last outlook wears. Then this takes one of
        its own: whether anybody asks must not change who enters.
        """
        now = memory.room(memory.capacity_tokens)
        if not ledger.running or self._last is None:
            return now
        look = self._last
        if look.worn(ledger):
            latest = next(reversed(ledger.running.values()))
            self._asked = look = self._looked(self._asked, ledger, memory, latest)
        return min(now, look.outlook.room)

    def _looked(self, last: _Look | None, ledger: Ledger, memory: Memory, like: Ticket) -> _Look:
        if last is not None and not last.worn(ledger):
            return last
        outlook = Outlook(self.lengths, ledger, memory, self._delta, like)
        return _Look(outlook, ledger.steps, _gone(ledger))


@dataclass(frozen=True, slots=True)
class _Look:
    """An outlook, and when it was taken: the step, and those who had left by then."""

    outlook: Outlook
    step: int
    gone: int

    def worn(self, ledger: Ledger) -> bool:
        """Whether it is too old, or too many have left."""
        left = _gone(ledger) - self.gone
        old = ledger.steps - self.step >= _OUTLOOK_STEPS
        return old or left > _OUTLOOK_ENDS * len(ledger.running)


def _gone(ledger: Ledger) -> int:
    return ledger.entered_total - len(ledger.running)


def _fits(outlook: Outlook, ticket: Ticket, tokens: int) -> bool:
    before = ticket.generated_tokens
    return tokens <= (outlook.room_at(before) if before else outlook.room)
