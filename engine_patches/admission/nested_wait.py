"""Nested WAIT, live: memory for what runs as it goes from segment to segment (arXiv 2504.11320).

Output lengths are unknown, and of each segment of lengths only the share is known that passes to
the next. As printed (``strict.py``), requests wait before a segment until n_k of them do, and the
memory must hold full batches of every stage: at usual rates, where about one request arrives in a
step, ten to a hundred times M*. Here requests that run always go on, n_1 enter in a step at most,
and a request enters if then those inside will fit with their safety buffer (``outlook.py``).
"""

from __future__ import annotations

from engine_patches.admission.ledger import Key, Ledger, Memory, Ticket, engine_order
from engine_patches.admission.outlook import Outlook
from engine_patches.admission.passing import Passing
from engine_patches.admission.policy import Verdict
from engine_patches.admission.wait import Rates, StepTime

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
        self._step_time = StepTime()
        self._rates = Rates()
        self._outlook: Outlook | None = None
        self._made_at = (0, 0)

    def key(self, ticket: Ticket) -> Key:
        """As the engine."""
        return engine_order(ticket)

    def threshold(self) -> int:
        """n_1, the least whole number for which (12) holds: n_1 / lambda > a step."""
        if self._entries is not None:
            return self._entries
        return 1 + int(self._rates.per_s(0) * self._step_time.mean_s)

    def admit(self, ledger: Ledger, memory: Memory, now_s: float) -> Verdict:
        """In the engine's order, up to the first that will not surely fit."""
        self._step_time.see(ledger, now_s)
        self._rates.see({0: sum(ledger.arrivals.values())}, now_s)
        most = min(memory.slots_free, self.threshold())
        if not ledger.waiting or most <= 0:
            return Verdict(())
        outlook = self._looked(ledger, memory)
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
        """What the last outlook leaves; in an empty engine, all."""
        now = memory.room(memory.capacity_tokens)
        if not ledger.running or self._outlook is None:
            return now
        return min(now, self._outlook.room)

    def _looked(self, ledger: Ledger, memory: Memory) -> Outlook:
        steps, left = self._made_at
        gone = ledger.entered_total - len(ledger.running)
        worn = gone - left > _OUTLOOK_ENDS * len(ledger.running)
        if self._outlook is None or worn or ledger.steps - steps >= _OUTLOOK_STEPS:
            head = ledger.waiting[0]
            self._outlook = Outlook(self.lengths, ledger, memory, self._delta, head)
            self._made_at = (ledger.steps, gone)
        return self._outlook


def _fits(outlook: Outlook, ticket: Ticket, tokens: int) -> bool:
    before = ticket.generated_tokens
    return tokens <= (outlook.room_at(before) if before else outlook.room)
