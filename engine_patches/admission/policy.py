"""What an admission policy is: a ledger and the memory in, who enters out."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from engine_patches.admission.ledger import Follower, Key, Ledger, Lengths, Memory, Ticket


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who enters in a step.

    Attributes:
        admit: in this order, as far as the engine has tokens to compute; None: whom the engine
            lets in by itself.
        run: running requests that go on, by id; None: all, as engines do.
        wake_s: when to ask again although nothing has happened; None: there is no need.
    """

    admit: Sequence[Ticket] | None
    run: Set[str] | None = None
    wake_s: float | None = None


class Admission(Protocol):
    """One policy, for one engine; its ledger is made by ``ledger_of``.

    An engine has memory for every request alone (the others are refused before they wait).
    """

    @property
    def name(self) -> str:
        """As in settings and on the command line."""
        ...

    @property
    def lengths(self) -> Lengths | None:
        """Where it takes output lengths from; None: it needs none."""
        ...

    @property
    def follower(self) -> Follower | None:
        """What of it is to be told who runs."""
        ...

    def key(self, ticket: Ticket) -> Key:
        """Its order of waiting; constant while a request waits."""
        ...

    def admit(self, ledger: Ledger, memory: Memory, now_s: float) -> Verdict:
        """Decide for a step that is about to be scheduled; once a step at most.

        Nobody that runs and nobody admitted: never while a request waits, except under a hold
        (``Verdict.wake_s``) or where no waiting request fits beside what else holds memory.
        """
        ...

    def admissible_tokens(self, ledger: Ledger, memory: Memory) -> int:
        """Prompt tokens that it would let in now if nobody waited (``admissible_kv_tokens``)."""
        ...


def ledger_of(admission: Admission) -> Ledger:
    """An empty ledger, kept as the policy needs it."""
    return Ledger(admission.key, admission.lengths, admission.follower)
