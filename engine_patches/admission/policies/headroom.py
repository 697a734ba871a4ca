"""Headroom: keeps a share w of the memory free of new requests, for the growth of running ones.

A request enters while KV + growth + its prompt <= (1 - w) C, all in blocks; growth is what the
running requests take in the step. A small w gains most: evictions are rare, and recomputation costs
more than the memory kept free. The best w depends on the lengths, so w follows the preemptions.

A constant w is the alpha-protection of arXiv 2502.07115, section 7 (``alpha_beta``). On overflow
each running request is cleared with probability beta and restarts from its prompt. Simulated
engines do that; vLLM preempts the request admitted last.
"""

from engine_patches.admission.ledger import Ledger, Memory, Ticket, engine_order
from engine_patches.admission.protocol import Verdict

WINDOW_ENTRIES = 128
TOLERATED = 0.02
RAISE = 0.01
LOWER = 0.005


def admit_below(
    limit_blocks: int, ledger: Ledger, memory: Memory, quota: dict[int, int] | None = None
) -> list[Ticket]:
    """Waiting requests in order, up to the first that would exceed a memory limit.

    At most ``limit_blocks`` are held after entry. If nothing runs, the first enters even beyond it,
    if it fits at all. ``quota`` limits the entries of each kind, to no more than wait; further
    requests of a kind are skipped. It is consumed.
    """
    admitted: list[Ticket] = []
    most = memory.slots_free if quota is None else min(memory.slots_free, sum(quota.values()))
    room = memory.room(limit_blocks)
    first = room if ledger.running else memory.room()
    for ticket in ledger.waiting:
        if len(admitted) >= most:
            break
        if quota is not None:
            if not quota.get(ticket.kind):
                continue
            quota[ticket.kind] -= 1
        blocks = memory.need(ticket)
        if blocks > (room if admitted else first):
            break
        admitted.append(ticket)
        room -= blocks
    return admitted


class Reserve:
    """The share w that is kept free, and its control.

    Every ``WINDOW_ENTRIES`` entries: if preemptions were more than 2 % of them, w rises by 0.01; if
    there were none, it falls by 0.005. It stays between ``least``, where it starts, and ``most``.
    """

    def __init__(self, least: float, most: float) -> None:
        self.share = least
        self._least = least
        self._most = most
        self._entered = 0
        self._preempted = 0

    def limit_blocks(self, ledger: Ledger, memory: Memory) -> int:
        """(1 - w) C; call it every step, because it learns from the ledger's counts."""
        entered = ledger.entered_total - self._entered
        if entered >= WINDOW_ENTRIES:
            preemptions = (ledger.preempted_total - self._preempted) / entered
            if preemptions > TOLERATED:
                self.share = min(self._most, self.share + RAISE)
            elif preemptions == 0:
                self.share = max(self._least, self.share - LOWER)
            self._entered, self._preempted = ledger.entered_total, ledger.preempted_total
        return self._limit_blocks(memory)

    def room(self, ledger: Ledger, memory: Memory) -> int:
        """Blocks that a request may bring if none waits."""
        return memory.room(self._limit_blocks(memory) if ledger.running else None)

    def _limit_blocks(self, memory: Memory) -> int:
        return int((1 - self.share) * memory.capacity_blocks)


class Headroom:
    """The engine's own order, below (1 - w) C."""

    lengths = None
    follower = None
    key = staticmethod(engine_order)

    def __init__(self, reserve: Reserve, name: str = "headroom") -> None:
        self.reserve = reserve
        self.name = name

    def admit(self, ledger: Ledger, memory: Memory, now_s: float) -> Verdict:
        return Verdict(admit_below(self.reserve.limit_blocks(ledger, memory), ledger, memory))

    def admissible_blocks(self, ledger: Ledger, memory: Memory) -> int:
        return self.reserve.room(ledger, memory)
