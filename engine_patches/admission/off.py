"""No admission of ours: the engine lets in whom it will, in its own order."""

from __future__ import annotations

from engine_patches.admission.ledger import Key, Ledger, Memory, Ticket, engine_order
from engine_patches.admission.policy import Verdict


class Off:
    """For comparison: what an engine does by itself."""

    name = "off"
    lengths = None
    follower = None

    def key(self, ticket: Ticket) -> Key:
        """As the engine."""
        return engine_order(ticket)

    def admit(self, ledger: Ledger, memory: Memory, now_s: float) -> Verdict:
        """Leave it to the engine."""
        return Verdict(None)

    def admissible_tokens(self, ledger: Ledger, memory: Memory) -> int:
        """All that is free."""
        return memory.room(memory.capacity_tokens)
