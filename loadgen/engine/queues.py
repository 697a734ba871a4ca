"""Order of entry to an engine: the engine's own, or an admission policy with its ledger."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from engine_patches.admission.ledger import Memory, Ticket
from engine_patches.admission.protocol import Admission, ledger_of

if TYPE_CHECKING:
    from loadgen.engine.request import EngineRequest


class EngineOrder:
    """vLLM's own order: by priority, then arrival; a preempted request gets its place back.

    A queue has the requests that wait for memory, and is told all later events of a request too.
    One whose KV is being fetched has entered, as it holds its memory.
    """

    admission: str | None = None  # name of the admission policy; None: the engine's own order
    run: Set[str] | None = None  # running requests that continue in the current step; None: all
    # Time at which to open another step even without an event; None: not needed.
    wake_s: float | None = None

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, EngineRequest]] = []
        self._waiting: dict[str, EngineRequest] = {}

    def arrived(self, request: EngineRequest) -> None:
        heapq.heappush(self._heap, (request.priority, request.arrival, request))
        self._waiting[request.id] = request

    preempted = arrived  # it lost its memory, and waits again with its remaining tokens

    def open(self, memory: Memory, now_s: float) -> None:
        """Prepare for a step; this order depends on neither memory nor time."""

    def head(self) -> EngineRequest | None:
        """The next request to enter, if it fits; None: none enters in this step."""
        while self._heap:
            request = self._heap[0][2]
            if self._waiting.get(request.id) is request:
                return request
            heapq.heappop(self._heap)
        return None

    def entered(self, request: EngineRequest) -> None:
        """The head has memory."""
        heapq.heappop(self._heap)
        del self._waiting[request.id]

    def left(self, request: EngineRequest) -> None:
        """It ended or was withdrawn, waiting or not."""
        if self._waiting.get(request.id) is request:
            del self._waiting[request.id]

    def stepped(self, still: Iterable[str]) -> None:
        """All requests with memory grew by a token, except those in ``still``."""

    def resized(self, request: EngineRequest) -> None:
        """A running request grew by more than a token in the step."""

    def admissible_blocks(self, memory: Memory) -> int:
        """Blocks of requests that would still be admitted."""
        return memory.capacity_blocks - memory.used_blocks


class PolicyOrder:
    """Order of an admission policy, with the ledger that it reads; methods as above."""

    def __init__(self, policy: Admission) -> None:
        self.policy = policy
        self.admission: str | None = policy.name
        self.ledger = ledger_of(policy)
        self.run: Set[str] | None = None
        self.wake_s: float | None = None
        self._requests: dict[str, EngineRequest] = {}
        self._order: list[Ticket] | None = []
        self._computing: list[Ticket] = []

    def arrived(self, request: EngineRequest) -> None:
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
                prefix=request.chain,
            )
        )

    def open(self, memory: Memory, now_s: float) -> None:
        verdict = self.policy.admit(self.ledger, memory, now_s)
        self.run, self.wake_s = verdict.run, verdict.wake_s
        self._order = None if verdict.admit is None else list(reversed(verdict.admit))

    def head(self) -> EngineRequest | None:
        waiting: Sequence[Ticket] = self._order or ()
        if self._order is None:
            waiting = self.ledger.waiting[:1]
        return self._requests[waiting[-1].id] if waiting else None

    def entered(self, request: EngineRequest) -> None:
        if self._order is not None:
            self._order.pop()
        found = request.load_tokens - request.prefill_left if request.fetch is None else 0
        self.ledger.entered(request.id, cached_tokens=found)

    def preempted(self, request: EngineRequest) -> None:
        self.ledger.preempted(request.id, keeps_tokens=request.generated_tokens > 0)

    def left(self, request: EngineRequest) -> None:
        del self._requests[request.id]
        ended = request.generated_tokens >= request.output_tokens
        self.ledger.left(request.id, by_itself=ended)

    def stepped(self, still: Iterable[str]) -> None:
        idle = list(still)
        for ticket in self._computing:
            ticket.uncomputed_tokens = 0
        self._computing = [self.ledger.running[id_] for id_ in idle]
        for ticket in self._computing:
            ticket.uncomputed_tokens = self._requests[ticket.id].prefill_left
        self.ledger.stepped(idle)

    def resized(self, request: EngineRequest) -> None:
        self.ledger.resized(self.ledger.running[request.id], request.load_tokens)

    def admissible_blocks(self, memory: Memory) -> int:
        return self.policy.admissible_blocks(self.ledger, memory)


Queue = EngineOrder | PolicyOrder


@dataclass(frozen=True, slots=True)
class Eviction:
    """Rule that selects victims when memory would overflow, and what they lose."""

    # Whether a request that returns starts again (arXiv 2504.11320, section 2.4); else it keeps its
    # tokens and recomputes their KV, as in vLLM.
    restart: bool = False
    # Beta, the probability of clearing each running request (arXiv 2502.07115, section 8), repeated
    # until the rest fits; 0: the last one admitted goes first.
    clearing: float = 0.0
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def victims(self, running: Sequence[EngineRequest]) -> Sequence[EngineRequest]:
        """The requests to evict; ``running`` is in order of admission."""
        if not self.clearing:
            return running[-1:]
        drawn = self.rng.random(len(running)) < self.clearing
        cleared = [request for request, out in zip(running, drawn, strict=True) if out]
        return cleared[::-1]
