from __future__ import annotations

from engine_patches.admission.ledger import Ledger, Memory, engine_order
from engine_patches.admission.protocol import Verdict


class Off:
    """What the engine does by itself."""

    name = "off"
    lengths = None
    follower = None
    key = staticmethod(engine_order)

    def admit(self, ledger: Ledger, memory: Memory, now_s: float) -> Verdict:
        return Verdict(None)

    def admissible_blocks(self, ledger: Ledger, memory: Memory) -> int:
        return memory.room()
