"""Who enters an engine next: the engine's own order, or an admission policy with its ledger."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from engine_patches.admission.ledger import Memory, Ticket
from engine_patches.admission.protocol import Admission, Verdict, ledger_of

if TYPE_CHECKING:
    from loadgen.emulator.engine import EngineRequest


class Queue(Protocol):
    """Requests that wait for memory; told of all that happens to them afterwards.

    A request whose KV is being fetched has entered, as it holds its memory.

    Attributes:
        admission: the policy that decides; None: the engine's own order.
        run: ids of running requests that go on in the step that was opened last; None: all do.
        wake_s: when to open another step although nothing has happened; None: no need.
    """

    admission: str | None
    run: Set[str] | None
    wake_s: float | None

    def arrived(self, request: EngineRequest) -> None:
        """A new request waits."""
        ...

    def open(self, memory: Memory, now_s: float) -> None:
        """A step is about to be scheduled; asked for its ``head`` from now on."""
        ...

    def head(self) -> EngineRequest | None:
        """Who enters next, if it fits; None: nobody in this step."""
        ...

    def entered(self, request: EngineRequest) -> None:
        """The head has memory."""
        ...

    def preempted(self, request: EngineRequest) -> None:
        """It lost its memory and waits again, with the tokens that it still has."""
        ...

    def left(self, request: EngineRequest) -> None:
        """It has ended or was withdrawn, waiting or not."""
        ...

    def stepped(self, still: Iterable[str]) -> None:
        """A step is over: all that hold memory grew by a token, but for those of ``still``."""
        ...

    def admissible_tokens(self, memory: Memory) -> int:
        """Prompt tokens that would still be let in."""
        ...


class EngineOrder:
    """vLLM's own: by priority, then arrival; who lost its memory has its place back."""

    admission: str | None = None
    run: Set[str] | None = None
    wake_s: float | None = None

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, EngineRequest]] = []
        self._waiting: dict[str, EngineRequest] = {}

    def arrived(self, request: EngineRequest) -> None:
        """See ``Queue.arrived``."""
        heapq.heappush(self._heap, (request.priority, request.arrival, request))
        self._waiting[request.id] = request

    preempted = arrived

    def open(self, memory: Memory, now_s: float) -> None:
        """See ``Queue.open``."""

    def head(self) -> EngineRequest | None:
        """See ``Queue.head``."""
        while self._heap:
            request = self._heap[0][2]
            if self._waiting.get(request.id) is request:
                return request
            heapq.heappop(self._heap)
        return None

    def entered(self, request: EngineRequest) -> None:
        """See ``Queue.entered``."""
        heapq.heappop(self._heap)
        del self._waiting[request.id]

    def left(self, request: EngineRequest) -> None:
        """See ``Queue.left``."""
        if self._waiting.get(request.id) is request:
            del self._waiting[request.id]

    def stepped(self, still: Iterable[str]) -> None:
        """See ``Queue.stepped``."""

    def admissible_tokens(self, memory: Memory) -> int:
        """See ``Queue.admissible_tokens``."""
        return memory.capacity_tokens - memory.used_tokens


class PolicyOrder:
    """An admission policy, and the ledger that it decides on.

    Args:
        policy: decides; for this engine alone.
    """

    def __init__(self, policy: Admission) -> None:
        self.policy = policy
        self.admission: str | None = policy.name
        self.ledger = ledger_of(policy)
        self.run: Set[str] | None = None
        self.wake_s: float | None = None
        self._requests: dict[str, EngineRequest] = {}
        self._order: list[Ticket] | None = []

    def arrived(self, request: EngineRequest) -> None:
        """See ``Queue.arrived``."""
        self._requests[request.id] = request
        self.ledger.arrived(
            Ticket(
                id=request.id,
                prompt_tokens=request.prompt_tokens,
                cap_tokens=request.cap_tokens,
                hint_tokens=request.hint_tokens,
                kind=request.kind,
                priority=request.priority,
                arrived_s=request.arrived_s,
            )
        )

    def open(self, memory: Memory, now_s: float) -> None:
        """See ``Queue.open``."""
        verdict = self.policy.admit(self.ledger, memory, now_s)
        self.run, self.wake_s = verdict.run, verdict.wake_s
        self._order = _reversed(verdict)

    def head(self) -> EngineRequest | None:
        """See ``Queue.head``."""
        waiting: Sequence[Ticket] = self._order or ()
        if self._order is None:
            waiting = self.ledger.waiting[:1]
        return self._requests[waiting[-1].id] if waiting else None

    def entered(self, request: EngineRequest) -> None:
        """See ``Queue.entered``."""
        if self._order is not None:
            self._order.pop()
        self.ledger.entered(request.id)

    def preempted(self, request: EngineRequest) -> None:
        """See ``Queue.preempted``."""
        self.ledger.preempted(request.id, keeps_tokens=request.generated_tokens > 0)

    def left(self, request: EngineRequest) -> None:
        """See ``Queue.left``."""
        del self._requests[request.id]
        ended = request.generated_tokens >= request.output_tokens
        self.ledger.left(request.id, by_itself=ended)

    def stepped(self, still: Iterable[str]) -> None:
        """See ``Queue.stepped``."""
        self.ledger.stepped(still)

    def admissible_tokens(self, memory: Memory) -> int:
        """See ``Queue.admissible_tokens``."""
        return self.policy.admissible_tokens(self.ledger, memory)


@dataclass(frozen=True, slots=True)
class Eviction:
    """Who loses memory when it would overflow, and with what loss.

    Attributes:
        restart: a request that returns begins anew (arXiv 2504.11320, section 2.4); else it keeps
            its tokens and recomputes their KV, as vLLM does.
        clearing: beta, the probability with which each running request is cleared (arXiv
            2502.07115, section 8), again and again until the rest fits; 0: the last one admitted
            goes first.
    """

    restart: bool = False
    clearing: float = 0.0
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def victims(self, running: Sequence[EngineRequest]) -> Sequence[EngineRequest]:
        """Who is to go, of requests in the order of their admission."""
        if not self.clearing:
            return running[-1:]
        drawn = self.rng.random(len(running)) < self.clearing
        cleared = [request for request, out in zip(running, drawn, strict=True) if out]
        return cleared[::-1]


def _reversed(verdict: Verdict) -> list[Ticket] | None:
    return None if verdict.admit is None else list(reversed(verdict.admit))
