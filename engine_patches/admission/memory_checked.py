"""MC-SF: the shortest first, as long as the memory suffices until all have ended.

Algorithm 2 of arXiv 2502.07115: those that run go on; of those that wait the one with the least
predicted output enters if at every end of running and admitted requests the memory suffices, and
so on up to the first for which it does not. Beside the paper: priorities; ageing, since the longest
would starve; memory in blocks; predictions that are surpassed are made anew; and a share of the
memory that stays free for their errors.
"""

from __future__ import annotations

from engine_patches.admission.completions import Completions
from engine_patches.admission.ledger import Key, Ledger, Lengths, Memory, Ticket
from engine_patches.admission.policy import Verdict


class MemoryChecked:
    """Who is predicted to end within the memory, the shortest first.

    Args:
        lengths: predictions.
        margin: share of the memory that is left free at every end, for errors of the predictions.
        ageing: tokens of output that a second of waiting counts for: a request of o tokens is
            overtaken by none that came o / ageing seconds after it.
    """

    name = "memory_checked"

    def __init__(self, lengths: Lengths, margin: float = 0.0, ageing: float = 0.0) -> None:
        self.lengths = lengths
        self.follower = Completions()
        self._margin = margin
        self._ageing = ageing

    def key(self, ticket: Ticket) -> Key:
        """Priority, then predicted length, later the later it came."""
        return (ticket.priority, ticket.predicted_tokens + self._ageing * ticket.arrived_s)

    def admit(self, ledger: Ledger, memory: Memory, now_s: float) -> Verdict:
        """Up to the first for which the memory would not suffice at some end."""
        completions = self.follower
        completions.fit(memory.capacity_tokens, memory.block_tokens)
        completions.settle()
        admitted = self._admit(ledger, memory)
        if not admitted and not ledger.running:
            admitted = self._alone(ledger, memory)
        return Verdict(admitted)

    def admissible_tokens(self, ledger: Ledger, memory: Memory) -> int:
        """What is free at the fullest of the ends; in an empty engine, all."""
        if not ledger.running:
            return memory.room(memory.capacity_tokens)
        free = self._limit_blocks(ledger, memory) - self.follower.highest_blocks()
        return max(0, min(free * memory.block_tokens, memory.room(memory.capacity_tokens)))

    def _admit(self, ledger: Ledger, memory: Memory) -> list[Ticket]:
        admitted: list[Ticket] = []
        completions, limit, prompt_tokens = self.follower, None, 0
        for ticket in ledger.waiting[: max(0, memory.slots_free)]:
            prompt_tokens += ticket.entry_tokens
            running = len(ledger.running) + len(admitted)
            ticket.late_steps = memory.late_steps(prompt_tokens, running)
            offset = ticket.entry_tokens - ledger.steps
            if completions.refuses(ticket, offset, self._most_blocks(memory)):
                break
            if limit is None:
                self._predict_again(ledger)
                limit = self._limit_blocks(ledger, memory)
            if not completions.book(ticket, offset, limit):
                break
            admitted.append(ticket)
        return admitted

    def _predict_again(self, ledger: Ledger) -> None:
        """Of those that go on beyond their predictions; only once it matters, as many then end."""
        for ticket in self.follower.surpassed(ledger.steps):
            ledger.predict_again(ticket)

    def _alone(self, ledger: Ledger, memory: Memory) -> list[Ticket]:
        """The first that waits, if the memory has room for it as it enters."""
        room = memory.room(memory.capacity_tokens)
        first = ledger.waiting[: min(1, memory.slots_free)]
        return [ticket for ticket in first if memory.rounded(ticket.entry_tokens) <= room]

    def _limit_blocks(self, ledger: Ledger, memory: Memory) -> int:
        """Blocks for requests: without the margin, and what else holds memory."""
        used = memory.used_tokens // memory.block_tokens
        return self._most_blocks(memory) - max(0, used - self.follower.held_blocks(ledger.steps))

    def _most_blocks(self, memory: Memory) -> int:
        return int((1 - self._margin) * memory.capacity_tokens) // memory.block_tokens
