"""One engine with continuous batching, as a pure model: no clock, no I/O, no text.

As in vLLM: requests wait in order of (priority, arrival), enter while a slot and KV memory are
free, grow by one token per step, and when the memory would overflow the request admitted last is
preempted: it waits again, keeps its tokens, and recomputes them when it returns.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class EngineRequest:
    """One sequence; the model knows where it ends.

    Attributes:
        output_tokens: tokens after which it ends, at least 1.
        priority: lower goes first.
        arrival: its place in the order of arrival, given by ``Engine.add``.
    """

    id: str
    prompt_tokens: int
    output_tokens: int
    priority: int = 0
    arrival: int = 0
    generated_tokens: int = 0

    @property
    def load_tokens(self) -> int:
        """KV tokens that it holds while it runs."""
        return self.prompt_tokens + self.generated_tokens

    @property
    def peak_tokens(self) -> int:
        """The most KV tokens that it ever holds, in its last step."""
        return self.prompt_tokens + self.output_tokens - 1


@dataclass(frozen=True, slots=True)
class Schedule:
    """What a step begins with.

    Attributes:
        prefill_tokens: tokens computed for the requests admitted in this step.
        decode_tokens: requests that were running before, one token each.
    """

    admitted: tuple[str, ...]
    preempted: tuple[str, ...]
    prefill_tokens: int
    decode_tokens: int


class Engine:
    """Slots, KV memory and a waiting queue; a step is ``schedule`` and then ``advance``.

    Args:
        slots: requests that may run at once.
        kv_tokens: tokens that fit in KV memory.
    """

    def __init__(self, slots: int, kv_tokens: int) -> None:
        self.slots = slots
        self.kv_tokens = kv_tokens
        self.running: list[EngineRequest] = []
        self.load_tokens = 0
        self.waiting_tokens = 0
        self.preemptions_total = 0
        self._queue: list[tuple[int, int, EngineRequest]] = []
        self._waiting: dict[str, EngineRequest] = {}
        self._arrivals = 0

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""
        return len(self._waiting)

    @property
    def unfinished(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.running or self._waiting)

    def add(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            ValueError: it could never fit, or its id is already known.
        """
        if request.output_tokens < 1 or request.peak_tokens > self.kv_tokens:
            raise ValueError(f"request {request.id} can never fit in {self.kv_tokens} KV tokens")
        if request.id in self._waiting or any(r.id == request.id for r in self.running):
            raise ValueError(f"request {request.id} is already here")
        request.arrival = self._arrivals
        self._arrivals += 1
        self._enqueue(request)

    def abort(self, request_id: str) -> bool:
        """Drop a request, waiting or running; False when it is not here."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self.waiting_tokens -= waiting.load_tokens
            return True
        for request in self.running:
            if request.id == request_id:
                self.running.remove(request)
                self.load_tokens -= request.load_tokens
                return True
        return False

    def schedule(self) -> Schedule:
        """Begin a step: make room for the running requests, else let waiting ones in."""
        preempted = self._preempt()
        kept = len(self.running)
        admitted = [] if preempted else self._admit()
        return Schedule(
            admitted=tuple(request.id for request in admitted),
            preempted=tuple(request.id for request in preempted),
            prefill_tokens=sum(request.load_tokens for request in admitted),
            decode_tokens=kept,
        )

    def advance(self) -> list[EngineRequest]:
        """End the step: every running request gains a token; returns those that ended."""
        finished = []
        for request in self.running:
            request.generated_tokens += 1
            if request.generated_tokens >= request.output_tokens:
                finished.append(request)
        self.load_tokens += len(self.running)
        for request in finished:
            self.running.remove(request)
            self.load_tokens -= request.load_tokens
        return finished

    def _preempt(self) -> list[EngineRequest]:
        preempted = []
        while self.load_tokens > self.kv_tokens:
            request = self.running.pop()
            self.load_tokens -= request.load_tokens
            self._enqueue(request)
            preempted.append(request)
        self.preemptions_total += len(preempted)
        return preempted

    def _admit(self) -> list[EngineRequest]:
        admitted = []
        while len(self.running) < self.slots and (request := self._head()) is not None:
            if self.load_tokens + request.load_tokens > self.kv_tokens:
                break
            heapq.heappop(self._queue)
            del self._waiting[request.id]
            self.waiting_tokens -= request.load_tokens
            self.load_tokens += request.load_tokens
            self.running.append(request)
            admitted.append(request)
        return admitted

    def _enqueue(self, request: EngineRequest) -> None:
        heapq.heappush(self._queue, (request.priority, request.arrival, request))
        self._waiting[request.id] = request
        self.waiting_tokens += request.load_tokens

    def _head(self) -> EngineRequest | None:
        while self._queue:
            request = self._queue[0][2]
            if self._waiting.get(request.id) is request:
                return request
            heapq.heappop(self._queue)
        return None
