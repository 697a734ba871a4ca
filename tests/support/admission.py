"""A small engine after the ledger's contract alone, and settings of every admission policy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine_patches.admission.ledger import Memory, Ticket
from engine_patches.admission.protocol import Admission, Verdict, ledger_of
from engine_patches.admission.settings import MAX_HOLD_S
from router.core.kv_blocks import KvBlocks

STEP_S = 0.1

VARIANTS: Mapping[str, Mapping[str, object]] = {
    "off": {"policy": "off"},
    "headroom": {"policy": "headroom", "headroom": 0.1},
    "headroom, constant": {"policy": "headroom", "adaptive": False},
    "alpha_beta": {"policy": "alpha_beta", "alpha": 0.3},
    "wait": {"policy": "wait"},
    "wait, thresholds": {"policy": "wait", "thresholds": [1, 2]},
    "wait, segments": {"policy": "wait", "thresholds": [2, 1, 1], "segments": [3, 9]},
    "wait, hold": {"policy": "wait", "thresholds": [3], "hold_s": 0.35},
    "nested_wait": {"policy": "nested_wait"},
    "nested_wait, given": {
        "policy": "nested_wait",
        "thresholds": [2, 2, 1],
        "segments": [4, 9],
        "rates": [2.0, 3.0, 1.0],
        "delta": 0.01,
    },
    "memory_checked": {"policy": "memory_checked"},
    "memory_checked, margin": {"policy": "memory_checked", "margin": 0.2, "length_margin": 0.5},
    "memory_checked, cap": {"policy": "memory_checked", "predict": "cap", "ageing": 0.0},
    "memory_checked, seen": {"policy": "memory_checked", "predict": "quantile:.3"},
}
"""Settings by a name for the tests; every policy is among them."""


def memory_of(capacity_tokens: int, used_tokens: int, slots_free: int, block: int = 1) -> Memory:
    """Memory whose requests keep every token, in whole blocks."""
    used = -(-used_tokens // block)
    return Memory(capacity_tokens // block, used, slots_free, KvBlocks.plain(block))


@dataclass(frozen=True, slots=True)
class Job:
    """A request as the client and the model make it; ``step``: before which it comes."""

    prompt_tokens: int
    output_tokens: int
    step: int = 0
    hint_tokens: int | None = None
    cap_tokens: int = 1000
    kind: int = 0
    priority: int = 0


@dataclass
class Small:
    """An engine of a few slots whose steps all take ``STEP_S``.

    Preempts the one that entered last; asks its policy only when nobody had to go.

    Attributes:
        entries: ids in the order of entering, those that return included.
        preempted: ids, as often as they lost their slot.
        ended: when each request ended, seconds.
        fullest: KV tokens that were held at most.
    """

    policy: Admission
    capacity: int
    slots: int = 8
    block: int = 1
    entries_per_step: int = 1000
    entries: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    ended: dict[str, float] = field(default_factory=dict)
    fullest: int = 0
    now_s: float = 0.0

    def run(self, jobs: Sequence[Job]) -> None:
        """All of them to their end."""
        self.jobs = {str(number): job for number, job in enumerate(jobs)}
        self.ledger = ledger_of(self.policy)
        coming = sorted(self.jobs, key=lambda id_: self.jobs[id_].step)
        while coming or self.ledger.waiting or self.ledger.running:
            while coming and self.jobs[coming[0]].step * STEP_S <= self.now_s:
                self._arrive(coming.pop(0))
            if not self._begin():
                idle_until = [self.jobs[id_].step * STEP_S for id_ in coming[:1]]
                self._idle(idle_until)
                continue
            self._end()

    def memory(self) -> Memory:
        """As a step is about to be scheduled."""
        sizes = (self.ledger.size_tokens(ticket) for ticket in self.ledger.running.values())
        used = sum(-(-size // self.block) * self.block for size in sizes)
        slots_free = self.slots - len(self.ledger.running)
        return memory_of(self.capacity, used, slots_free, self.block)

    def used_tokens(self) -> int:
        """In whole blocks."""
        return self.memory().used_blocks * self.block

    def _arrive(self, id_: str) -> None:
        job = self.jobs[id_]
        self.ledger.arrived(
            Ticket(
                id_,
                job.prompt_tokens,
                job.cap_tokens,
                job.hint_tokens,
                job.kind,
                job.priority,
                job.step * STEP_S,
            )
        )

    def _begin(self) -> bool:
        """Make room or let in; whether anybody runs."""
        crowded = False
        while self.used_tokens() > self.capacity:
            last = next(reversed(self.ledger.running))
            self.ledger.preempted(last)
            self.preempted.append(last)
            crowded = True
        if not crowded:
            verdict = self.policy.admit(self.ledger, self.memory(), self.now_s)
            self._enter(verdict)
            self._check_idling(verdict)
        self.fullest = max(self.fullest, self.used_tokens())
        return bool(self.ledger.running)

    def _enter(self, verdict: Verdict) -> None:
        admit = self.ledger.waiting[:] if verdict.admit is None else verdict.admit
        assert len({ticket.id for ticket in admit}) == len(admit)
        for ticket in admit[: self.entries_per_step]:
            memory = self.memory()
            fits = memory.need(ticket) <= memory.room()
            if verdict.admit is None and not (fits and memory.slots_free):
                break
            assert fits
            assert memory.slots_free
            self.check_entry(ticket)
            self.ledger.entered(ticket.id)
            self.entries.append(ticket.id)

    def check_entry(self, ticket: Ticket) -> None:
        """For laws about who enters while others wait."""

    def _check_idling(self, verdict: Verdict) -> None:
        """Nobody runs though somebody waits: only under a hold, and never beyond its limit."""
        if self.ledger.running or not self.ledger.waiting:
            return
        assert verdict.wake_s is not None
        first_s = min(ticket.arrived_s for ticket in self.ledger.waiting)
        assert self.now_s < verdict.wake_s <= first_s + MAX_HOLD_S
        self.wake_s = verdict.wake_s

    def _idle(self, until: list[float]) -> None:
        if self.ledger.waiting:
            until.append(self.wake_s)
        self.now_s = max(self.now_s, min(until))

    def _end(self) -> None:
        self.ledger.stepped()
        self.now_s += STEP_S
        for ticket in list(self.ledger.running.values()):
            if self.ledger.generated_tokens(ticket) >= self.jobs[ticket.id].output_tokens:
                self.ledger.left(ticket.id)
                self.ended[ticket.id] = self.now_s


def end_step(ticket: Ticket) -> int:
    """Predicted last step of one that runs, as ``Ledger.steps`` counts."""
    return ticket.prompt_tokens + ticket.predicted_tokens - 1 - ticket.offset_tokens
