"""MC-SF, Algorithm 2 of arXiv 2502.07115: shortest first, while the memory suffices for all.

Running requests go on. The waiting request with the least predicted output enters if the memory
suffices at every end of running and admitted requests; so on to the first that does not fit.
Extensions: priorities, ageing (the longest would starve), memory in blocks, renewal of exceeded
predictions, and a share of memory kept free for their errors.
"""

from engine_patches.admission.ledger import Key, Ledger, Lengths, Memory, Ticket
from engine_patches.admission.protocol import Verdict
from engine_patches.admission.theory.completions import Completions


class MemoryChecked:
    """``margin`` is kept free at every end, a share of the memory, for errors of the predictions.

    ``ageing``: output tokens that one second of waiting offsets. No request that comes o / ageing
    seconds after one of o tokens overtakes it.
    """

    name = "memory_checked"

    def __init__(self, lengths: Lengths, margin: float = 0.0, ageing: float = 0.0) -> None:
        self.lengths = lengths
        self.follower = Completions()
        self._margin = margin
        self._ageing = ageing

    def key(self, ticket: Ticket) -> Key:
        return (ticket.priority, ticket.predicted_tokens + self._ageing * ticket.arrived_s)

    def admit(self, ledger: Ledger, memory: Memory, now_s: float) -> Verdict:
        completions = self.follower
        completions.fit(memory)
        completions.settle()
        admitted = self._admit(ledger, memory)
        if not admitted and not ledger.running:
            # An empty engine takes the first request if the memory has room for it as it enters.
            first = ledger.waiting[: min(1, memory.slots_free)]
            admitted = [one for one in first if memory.need(one) <= memory.room()]
        return Verdict(admitted)

    def admissible_blocks(self, ledger: Ledger, memory: Memory) -> int:
        """Memory free at the fullest end; in an empty engine, all."""
        if not ledger.running:
            return memory.room()
        # One that was admitted and has not entered may have been withdrawn since.
        self.follower.settle()
        free = self._limit_blocks(ledger, memory) - self.follower.highest_blocks()
        return max(0, min(free, memory.room()))

    def _admit(self, ledger: Ledger, memory: Memory) -> list[Ticket]:
        admitted: list[Ticket] = []
        completions, limit, before_tokens = self.follower, None, 0
        # A prompt takes more as it enters than later where a window leaves it.
        room = memory.room() if memory.kv.windowed else None
        for ticket in ledger.waiting[: max(0, memory.slots_free)]:
            running = len(ledger.running) + len(admitted)
            ticket.late_steps = memory.late_steps(ticket.entry_tokens, before_tokens, running)
            before_tokens += ticket.entry_tokens
            offset = ticket.entry_tokens - ledger.steps
            if completions.refuses(ticket, offset, self._most_blocks(memory)):
                break
            if limit is None:
                # Exceeded predictions are renewed only when it matters: many end by then.
                for surpassed in completions.surpassed(ledger.steps):
                    ledger.predict_again(surpassed)
                limit = self._limit_blocks(ledger, memory)
            if room is not None and (room := room - memory.need(ticket)) < 0:
                break
            if not completions.book(ticket, offset, limit):
                break
            admitted.append(ticket)
        return admitted

    def _limit_blocks(self, ledger: Ledger, memory: Memory) -> int:
        """Blocks without the margin and other holders of memory."""
        others = memory.used_blocks - self.follower.held_blocks(ledger.steps)
        return self._most_blocks(memory) - max(0, others)

    def _most_blocks(self, memory: Memory) -> int:
        return int((1 - self._margin) * memory.capacity_blocks)
