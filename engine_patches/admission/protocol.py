from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from engine_patches.admission.ledger import Follower, Key, Ledger, Lengths, Memory, Ticket


@dataclass(frozen=True, slots=True)
class Verdict:
    """Admissions of one step."""

    # In this order, as far as the engine has tokens to compute; None: its own choice.
    admit: Sequence[Ticket] | None
    run: Set[str] | None = None  # ids of running requests that go on; None: all, as in real engines
    wake_s: float | None = None  # time at which to decide again even without an event


class Admission(Protocol):
    """One policy for one engine; ``ledger_of`` makes its ledger.

    An engine has memory for every single request (larger ones are rejected before they wait).
    """

    @property
    def name(self) -> str:
        """In settings and on the command line."""

    @property
    def lengths(self) -> Lengths | None:
        """None: it needs none."""

    @property
    def follower(self) -> Follower | None:
        """Part of the policy that tracks the running requests."""

    def key(self, ticket: Ticket) -> Key:
        """Place in the waiting order; constant while the request waits."""

    def admit(self, ledger: Ledger, memory: Memory, now_s: float) -> Verdict:
        """Decide for the step about to be scheduled; at most once a step.

        With nothing running, a waiting request must be admitted. Exceptions: a hold
        (``Verdict.wake_s``), or none fits beside other holders of memory.
        """

    def admissible_blocks(self, ledger: Ledger, memory: Memory) -> int:
        """Blocks of requests admissible with an empty queue."""


def ledger_of(admission: Admission) -> Ledger:
    """An empty ledger configured for the policy."""
    return Ledger(admission.key, admission.lengths, admission.follower)
