"""One engine with continuous batching, as a pure model: no clock, no I/O, no text.

As in vLLM: requests wait in order of (priority, arrival), enter while a slot and KV memory are
free, grow by one token per step, and when the memory would overflow the request admitted last is
preempted: it waits again, keeps its tokens, and recomputes them when it returns.

With a chunk, prompts take steps (chunked prefill): a step computes so many tokens at most, one of
each request that decodes, the rest of prompts in the order of their admission. A prompt has memory
for all of it from its admission on, and its first token comes in the step that computes its last.

A prompt whose KV another engine has (``EngineRequest.fetch``) is fetched as vLLM 0.32 does: once it
is first in the queue, a slot and memory are free, the transfer begins. The request goes on waiting,
with its memory but without a slot; when the KV is there it enters before all that hold no memory.
"""

from __future__ import annotations

import heapq
import sys
from dataclasses import dataclass

from loadgen.emulator.handoff import Fetch, KeptKv


@dataclass(slots=True, eq=False)
class EngineRequest:
    """One sequence; the model knows where it ends.

    Attributes:
        output_tokens: tokens after which it ends, at least 1.
        priority: lower goes first.
        arrival: its place in the order of arrival, given by ``Engine.add``.
        keeps_kv: when it has ended its KV stays, for another engine to fetch.
        fetch: its prompt's KV, which another engine has; None once it came, or for none.
        fetched_s: when the transfer under way ends, engine seconds.
        prefill_left: tokens that it computes, as it runs, before it generates the next one.
    """

    id: str
    prompt_tokens: int
    output_tokens: int
    priority: int = 0
    arrival: int = 0
    generated_tokens: int = 0
    keeps_kv: bool = False
    fetch: Fetch | None = None
    fetched_s: float = 0.0
    prefill_left: int = 0

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
        prefill_tokens: tokens computed of prompts, and of requests that return.
        decode_tokens: requests that go on, one token each.
        failed: requests that ended because their KV could not be fetched.
    """

    admitted: tuple[str, ...]
    preempted: tuple[str, ...]
    prefill_tokens: int
    decode_tokens: int
    failed: tuple[str, ...] = ()


class _Budget:
    """Tokens that a step may still compute, and what it computes."""

    def __init__(self, tokens: int) -> None:
        self.left = tokens
        self.prefill_tokens = 0
        self.decode_tokens = 0

    def decode(self, requests: int) -> None:
        """Compute the next token of so many requests."""
        self.decode_tokens += requests
        self.left -= requests

    def prefill(self, request: EngineRequest) -> None:
        """Compute what is left of a request's prompt, as far as it goes."""
        tokens = min(self.left, request.prefill_left)
        request.prefill_left -= tokens
        self.prefill_tokens += tokens
        self.left -= tokens


class Engine:
    """Slots, KV memory and a waiting queue; a step is ``schedule`` and then ``advance``.

    Args:
        slots: requests that may run at once.
        kv_tokens: tokens that fit in KV memory.
        chunk: the most tokens that a step computes, above ``slots``; None for no bound.
        lease_s: how long KV stays that nobody fetches, engine seconds.
        recompute: whether a prompt whose KV cannot be fetched is computed here; else it fails.

    Attributes:
        load_tokens: of the running requests.
        fetching_tokens: memory of requests whose KV is on its way, or came and waits for a slot.
        kept: KV of requests that have ended.
        generated_total: tokens generated.
        failed_loads_total: requests whose KV could not be fetched.
    """

    def __init__(
        self,
        slots: int,
        kv_tokens: int,
        *,
        chunk: int | None = None,
        lease_s: float = 0.0,
        recompute: bool = False,
    ) -> None:
        self.slots = slots
        self.kv_tokens = kv_tokens
        self.running: list[EngineRequest] = []
        self.kept = KeptKv(lease_s)
        self.load_tokens = 0
        self.fetching_tokens = 0
        self.waiting_tokens = 0
        self.preemptions_total = 0
        self.generated_total = 0
        self.failed_loads_total = 0
        self._chunk = sys.maxsize if chunk is None else chunk
        self._recompute = recompute
        self._queue: list[tuple[int, int, EngineRequest]] = []
        self._waiting: dict[str, EngineRequest] = {}
        self._fetching: list[EngineRequest] = []
        self._ready: list[EngineRequest] = []
        self._arrivals = 0

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot, their KV being here or not."""
        return len(self._waiting)

    @property
    def used_tokens(self) -> int:
        """KV memory in use."""
        return self.load_tokens + self.fetching_tokens + self.kept.tokens

    @property
    def unfinished(self) -> bool:
        """Whether there is anything to do; a transfer under way is, as vLLM's engines poll it."""
        return bool(self.running or self._waiting or self._fetching)

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
        """Drop a request, waiting or running; False when it is not here.

        Memory that a transfer writes to is free when the transfer has ended.
        """
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self._abort_waiting(waiting)
            return True
        for request in self.running:
            if request.id == request_id:
                self.running.remove(request)
                self.load_tokens -= request.load_tokens
                return True
        return False

    def die(self, now_s: float) -> None:
        """All that it holds is lost, and it renews no lease of others."""
        self.kept.lose()
        for request in (*self._waiting.values(), *self._fetching):
            if request.fetch is not None:
                request.fetch.die(now_s)

    def schedule(self, now_s: float = 0.0) -> Schedule:
        """Begin a step: make room for the running requests, else let waiting ones in.

        Args:
            now_s: engine seconds; matters to an engine that keeps or fetches KV.
        """
        self.kept.expire(now_s)
        failed = self._end_fetches(now_s)
        preempted = self._preempt()
        budget = _Budget(self._chunk)
        prefilling = [request for request in self.running if request.prefill_left]
        budget.decode(len(self.running) - len(prefilling))
        for request in prefilling:
            budget.prefill(request)
        admitted = [] if preempted else self._admit(now_s, budget)
        return Schedule(
            admitted=tuple(request.id for request in admitted),
            preempted=tuple(request.id for request in preempted),
            prefill_tokens=budget.prefill_tokens,
            decode_tokens=budget.decode_tokens,
            failed=tuple(failed),
        )

    def advance(self, now_s: float = 0.0) -> list[EngineRequest]:
        """End the step: requests whose prompt is computed gain a token; returns those that ended.

        Args:
            now_s: engine seconds; matters to an engine that keeps KV.
        """
        finished, generated = [], 0
        for request in self.running:
            if request.prefill_left:
                continue
            generated += 1
            request.generated_tokens += 1
            if request.generated_tokens >= request.output_tokens:
                finished.append(request)
        self.load_tokens += generated
        self.generated_total += generated
        for request in finished:
            self.running.remove(request)
            self.load_tokens -= request.load_tokens
            if request.keeps_kv:
                self.kept.keep(request.id, request.peak_tokens, now_s)
        return finished

    def _preempt(self) -> list[EngineRequest]:
        preempted = []
        while self.used_tokens > self.kv_tokens:
            request = self.running.pop()
            self.load_tokens -= request.load_tokens
            self._enqueue(request)
            preempted.append(request)
        self.preemptions_total += len(preempted)
        return preempted

    def _admit(self, now_s: float, budget: _Budget) -> list[EngineRequest]:
        admitted = []
        while len(self.running) < self.slots and budget.left:
            request = self._next(now_s)
            if request is None:
                break
            del self._waiting[request.id]
            self.waiting_tokens -= request.load_tokens
            self.load_tokens += request.load_tokens
            self.running.append(request)
            if request.prefill_left:
                budget.prefill(request)
            else:
                budget.decode(1)
            admitted.append(request)
        return admitted

    def _next(self, now_s: float) -> EngineRequest | None:
        """Who runs next: first those that hold memory; transfers of those before it begin."""
        if self._ready:
            request = self._ready.pop(0)
            self.fetching_tokens -= request.load_tokens
            return request
        while (head := self._head()) is not None:
            if self.used_tokens + head.load_tokens > self.kv_tokens:
                break
            heapq.heappop(self._queue)
            if head.fetch is None:
                head.prefill_left = head.load_tokens
                return head
            head.fetched_s = now_s + head.fetch.seconds
            self.fetching_tokens += head.load_tokens
            self._fetching.append(head)
        return None

    def _end_fetches(self, now_s: float) -> list[str]:
        """See which transfers have ended; returns the requests that end with theirs."""
        failed = []
        over = [request for request in self._fetching if request.fetched_s <= now_s]
        for request in over:
            self._fetching.remove(request)
            fetch, request.fetch = request.fetch, None
            assert fetch is not None
            if self._waiting.get(request.id) is not request:
                fetch.cancel()
                self.fetching_tokens -= request.load_tokens
                continue
            arrived = fetch.end()
            self.failed_loads_total += not arrived
            if arrived or self._recompute:
                request.prefill_left = 0 if arrived else request.load_tokens
                self._ready.append(request)
            else:
                failed.append(request.id)
                self._drop_fetching(request)
        return failed

    def _drop_fetching(self, request: EngineRequest) -> None:
        del self._waiting[request.id]
        self.waiting_tokens -= request.load_tokens
        self.fetching_tokens -= request.load_tokens

    def _abort_waiting(self, request: EngineRequest) -> None:
        self.waiting_tokens -= request.load_tokens
        if request in self._ready:
            self._ready.remove(request)
            self.fetching_tokens -= request.load_tokens
        elif request.fetch is not None and request not in self._fetching:
            request.fetch.cancel()

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
