"""Nested WAIT, live: reserves memory for requests on their way through segments (arXiv 2504.11320).

Known is only the share of each output length segment that passes to the next. As printed
(``strict.py``), requests wait before a segment until n_k of them do, and the memory must hold full
batches of every stage: at about one arrival per step, ten to a hundred times M*. Here running
requests always go on, and a request enters if the running ones will then fit with their safety
buffer (``outlook.py``).

The buffer grows with the square root of the number of requests in memory. For few requests it needs
about as much as if all went on; a larger delta then suits better.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine_patches.admission.ledger import Ledger, Memory, Ticket, engine_order
from engine_patches.admission.policies.wait import Pace
from engine_patches.admission.protocol import Verdict
from engine_patches.admission.theory.outlook import Outlook
from engine_patches.admission.theory.passing import Passing

# An outlook costs more than a step may, so it serves several steps while few requests leave.
_OUTLOOK_STEPS = 8
_OUTLOOK_ENDS = 1 / 8


class NestedWait:
    """Admits requests that fit with the expected growth of the running ones, at most n_1 a step.

    Args:
        entries: n_1; None: measured, as ``wait`` does.
        delta: probability that running requests will need more memory than there is.
    """

    name = "nested_wait"
    follower = None
    key = staticmethod(engine_order)

    def __init__(self, passing: Passing, entries: int | None = None, delta: float = 0.1) -> None:
        self.lengths = passing
        self._entries = entries
        self._delta = delta
        self._pace = Pace()
        self._last: _Look | None = None
        self._asked: _Look | None = None

    def threshold(self, ledger: Ledger) -> int:
        """n_1, for which (12) holds, n_1 / lambda > a step, and a backlog drains."""
        return self._entries or self._pace.entries(ledger.arrivals)

    def admit(self, ledger: Ledger, memory: Memory, now_s: float) -> Verdict:
        self._pace.see(ledger, now_s)
        most = min(memory.slots_free, self.threshold(ledger))
        if not ledger.waiting or most <= 0:
            return Verdict(())
        self._last = look = self._looked(self._last, ledger, memory, ledger.waiting[0])
        outlook = look.outlook
        outlook.settle()
        now = memory.room()
        admitted: list[Ticket] = []
        for ticket in ledger.waiting[:most]:
            blocks = memory.need(ticket)
            tokens = memory.kv.tokens(blocks)
            alone = not (ledger.running or admitted)
            before = ticket.generated_tokens
            room = outlook.room_at(before) if before else outlook.room
            if blocks > now or not (alone or tokens <= room):
                break
            outlook.take(ticket, tokens)
            now -= blocks
            admitted.append(ticket)
        return Verdict(admitted)

    def admissible_blocks(self, ledger: Ledger, memory: Memory) -> int:
        """Memory left beside the expected growth; in an empty engine, all.

        While no request waits, the last outlook wears out. This makes one of its own, so that its
        calls do not change admissions.
        """
        now = memory.room()
        if not ledger.running or self._last is None:
            return now
        look = self._last
        if look.worn(ledger):
            latest = next(reversed(ledger.running.values()))
            self._asked = look = self._looked(self._asked, ledger, memory, latest)
        return min(now, memory.kv.entering(look.outlook.room + 1) - 1)

    def _looked(self, last: _Look | None, ledger: Ledger, memory: Memory, like: Ticket) -> _Look:
        if last is not None and not last.worn(ledger):
            return last
        outlook = Outlook(self.lengths, ledger, memory, self._delta, like)
        return _Look(outlook, ledger.steps, _gone(ledger))


@dataclass(frozen=True, slots=True)
class _Look:
    """An outlook, its step, and the number of requests gone by then."""

    outlook: Outlook
    step: int
    gone: int

    def worn(self, ledger: Ledger) -> bool:
        left = _gone(ledger) - self.gone
        old = ledger.steps - self.step >= _OUTLOOK_STEPS
        return old or left > _OUTLOOK_ENDS * len(ledger.running)


def _gone(ledger: Ledger) -> int:
    return ledger.entered_total - len(ledger.running)
