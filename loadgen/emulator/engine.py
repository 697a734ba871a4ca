"""One engine with continuous batching, as a pure model: no clock, no I/O, no text.

As in vLLM: requests wait in order of (priority, arrival), enter while a slot and KV memory are
free, grow by a token a step, and when the memory would overflow the last one admitted is preempted:
it waits again, keeps its tokens, and recomputes them when it returns. Who enters and who is
preempted, others may decide (``queues``).

With a chunk, prompts take steps (chunked prefill): a step computes so many tokens at most, one of
each request that decodes, the rest of prompts in the order of their admission. A prompt has memory
for all of it from its admission on, and its first token comes in the step that computes its last.

A prompt whose KV another engine has (``EngineRequest.fetch``) is fetched as vLLM 0.32 does: once it
is first in the queue, a slot and memory are free, the transfer begins. The request goes on waiting,
with its memory but without a slot; when the KV is there it enters before all that hold no memory.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain, count

from engine_patches.admission.ledger import Memory
from loadgen.emulator.handoff import Fetch, KeptKv
from loadgen.emulator.queues import EngineOrder, Eviction, Queue
from loadgen.emulator.schedule import Budget, Schedule
from router.core.wire import request_token


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
        cap_tokens: output tokens at which it ends at the latest, for admission, to whom
            ``output_tokens`` is not shown; 0: none but the engine's memory.
        hint_tokens: output tokens at which its client says that it ends, for admission.
        kind: its type, for admission that knows types.
        arrived_s: when it came, engine seconds, for admission.
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
    cap_tokens: int = 0
    hint_tokens: int | None = None
    kind: int = 0
    arrived_s: float = 0.0

    @property
    def load_tokens(self) -> int:
        """KV tokens that it holds while it runs."""
        return self.prompt_tokens + self.generated_tokens

    @property
    def peak_tokens(self) -> int:
        """The most KV tokens that it ever holds, in its last step."""
        return self.prompt_tokens + self.output_tokens - 1


class Engine:
    """Slots, KV memory and a waiting queue; a step is ``schedule`` and then ``advance``.

    Args:
        slots: requests that may run at once.
        kv_tokens: tokens that fit in KV memory.
        block_tokens: a running request takes memory in such blocks.
        chunk: the most tokens that a step computes, above ``slots``; None for no bound.
        lease_s: how long KV stays that nobody fetches, engine seconds.
        recompute: whether a prompt whose KV cannot be fetched is computed here; else it fails.
        watermark: share of the blocks that stays free as requests enter beside others, as vLLM's.
        prefill_first: a step computes prompts, or it decodes, as vLLM did before its V1; else
            running requests go first and prompts fill the step, as in vLLM since and in Sarathi.
        eviction: who loses memory that overflows, and with what loss.
        queue: in place of vLLM's order of waiting; its own for every engine.

    Attributes:
        load_tokens: of the running requests.
        fetching_tokens: memory of requests whose KV is on its way, or came and waits for a slot.
        kept: KV of requests that have ended.
        admission: the policy that decides; None: its own order.
        generated_total: tokens generated.
        lost_total: of these, those that evictions threw away.
        failed_loads_total: requests whose KV could not be fetched.
    """

    def __init__(
        self,
        slots: int,
        kv_tokens: int,
        *,
        block_tokens: int = 1,
        chunk: int | None = None,
        lease_s: float = 0.0,
        recompute: bool = False,
        watermark: float = 0.0,
        prefill_first: bool = False,
        eviction: Eviction | None = None,
        queue: Queue | None = None,
    ) -> None:
        self.slots = slots
        self.kv_tokens = kv_tokens // block_tokens * block_tokens
        self.running: list[EngineRequest] = []
        self.kept = KeptKv(lease_s)
        self.load_tokens = self.fetching_tokens = self.waiting_tokens = 0
        self.preemptions_total = self.failed_loads_total = 0
        self.generated_total = self.lost_total = 0
        self._block_tokens = block_tokens
        # Of the running requests' last blocks, what holds no token.
        self._slack_tokens = 0
        self._chunk = sys.maxsize if chunk is None else chunk
        self._recompute = recompute
        self._watermark_tokens = int(watermark * (kv_tokens // block_tokens)) * block_tokens
        self._prefill_first = prefill_first
        self._eviction = eviction or Eviction()
        self._queue = queue or EngineOrder()
        self.admission = self._queue.admission
        self._paused: Set[str] = frozenset()
        self._waiting: dict[str, EngineRequest] = {}
        self._fetching: list[EngineRequest] = []
        self._ready: list[EngineRequest] = []
        self._arrivals = count()

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot, their KV being here or not."""
        return len(self._waiting)

    @property
    def waiting_routed(self) -> int:
        """Those of them that routers have sent."""
        return sum(request_token(id_) is not None for id_ in self._waiting)

    @property
    def used_tokens(self) -> int:
        """KV memory in use."""
        running_tokens = self.load_tokens + self._slack_tokens
        return running_tokens + self.fetching_tokens + self.kept.tokens

    @property
    def batch(self) -> Sequence[EngineRequest]:
        """Requests that take part in the step that has begun."""
        if not self._paused:
            return self.running
        return [request for request in self.running if request.id not in self._paused]

    @property
    def batch_tokens(self) -> int:
        """KV tokens that they hold."""
        if not self._paused:
            return self.load_tokens
        return sum(request.load_tokens for request in self.batch)

    @property
    def admissible_tokens(self) -> int:
        """Prompt tokens that would still be let in."""
        return max(0, min(self._queue.admissible_tokens(self._memory()), self._free_tokens()))

    @property
    def unfinished(self) -> bool:
        """Whether there is anything to do; a transfer under way is, as vLLM's engines poll it."""
        return bool(self.running or self._waiting or self._fetching)

    def add(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            ValueError: it could never fit, or its id is already known.
        """
        if request.output_tokens < 1 or self._rounded(request.peak_tokens) > self.kv_tokens:
            raise ValueError(f"request {request.id} can never fit in {self.kv_tokens} KV tokens")
        if request.id in self._waiting or any(r.id == request.id for r in self.running):
            raise ValueError(f"request {request.id} is already here")
        request.arrival = next(self._arrivals)
        request.cap_tokens = request.cap_tokens or self.kv_tokens - request.prompt_tokens + 1
        self._wait(request)
        self._queue.arrived(request)

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
                self._remove(request)
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
        self._queue.open(self._memory(), now_s)
        budget = Budget(self._chunk)
        self._paused = self._held_back()
        prefilling = [request for request in self.batch if request.prefill_left]
        decoding = len(self.batch) - len(prefilling)
        if not self._prefill_first:
            budget.decode(decoding)
        for request in prefilling:
            request.prefill_left = budget.prefill(request.prefill_left)
        admitted = [] if preempted else self._admit(now_s, budget)
        if self._prefill_first and budget.prefill_tokens:
            computed = {request.id for request in (*prefilling, *admitted)}
            self._paused = {request.id for request in self.running} - computed
        elif self._prefill_first:
            budget.decode(decoding)
        return Schedule(
            admitted=tuple(request.id for request in admitted),
            preempted=tuple(request.id for request in preempted),
            prefill_tokens=budget.prefill_tokens,
            decode_tokens=budget.decode_tokens,
            failed=tuple(failed),
            wake_s=self._queue.wake_s,
        )

    def advance(self, now_s: float = 0.0) -> list[EngineRequest]:
        """End the step: requests whose prompt is computed gain a token; returns those that ended.

        Args:
            now_s: engine seconds; matters to an engine that keeps KV.
        """
        finished, generated, paused = [], 0, self._paused
        for request in self.running:
            if request.prefill_left or (paused and request.id in paused):
                continue
            generated += 1
            request.generated_tokens += 1
            if request.generated_tokens >= request.output_tokens:
                finished.append(request)
        self.load_tokens += generated
        self.generated_total += generated
        self._queue.stepped(self._still())
        if self._block_tokens > 1:
            self._slack_tokens = sum(self._slack(request) for request in self.running)
        for request in finished:
            self._remove(request)
            if request.keeps_kv:
                self.kept.keep(request.id, request.peak_tokens, now_s)
        return finished

    def _preempt(self) -> list[EngineRequest]:
        preempted = []
        while self.used_tokens > self.kv_tokens:
            for request in self._eviction.victims(self.running):
                self._evict(request)
                preempted.append(request)
        self.preemptions_total += len(preempted)
        return preempted

    def _admit(self, now_s: float, budget: Budget) -> list[EngineRequest]:
        admitted = []
        while len(self.running) < self.slots and budget.left:
            request = self._next(now_s)
            if request is None:
                break
            del self._waiting[request.id]
            self.waiting_tokens -= request.load_tokens
            self.load_tokens += request.load_tokens
            self._slack_tokens += self._slack(request)
            self.running.append(request)
            if request.prefill_left:
                request.prefill_left = budget.prefill(request.prefill_left)
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
        while (head := self._queue.head()) is not None and self._fits(head):
            self._queue.entered(head)
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
        for request in [each for each in self._fetching if each.fetched_s <= now_s]:
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
                self._queue.left(request)
                del self._waiting[request.id]
                self.waiting_tokens -= request.load_tokens
                self.fetching_tokens -= request.load_tokens
        return failed

    def _abort_waiting(self, request: EngineRequest) -> None:
        self._queue.left(request)
        self.waiting_tokens -= request.load_tokens
        if request in self._ready:
            self._ready.remove(request)
            self.fetching_tokens -= request.load_tokens
        elif request.fetch is not None and request not in self._fetching:
            request.fetch.cancel()

    def _wait(self, request: EngineRequest) -> None:
        self._waiting[request.id] = request
        self.waiting_tokens += request.load_tokens

    def _remove(self, request: EngineRequest) -> None:
        self._release(request)
        self._queue.left(request)

    def _release(self, request: EngineRequest) -> None:
        self.running.remove(request)
        self.load_tokens -= request.load_tokens
        self._slack_tokens -= self._slack(request)

    def _evict(self, request: EngineRequest) -> None:
        self._release(request)
        if self._eviction.restart:
            self.lost_total += request.generated_tokens
            request.generated_tokens = 0
        self._wait(request)
        self._queue.preempted(request)

    def _memory(self) -> Memory:
        slots_free = max(0, self.slots - len(self.running) - len(self._ready))
        memory = Memory(self.kv_tokens, self.used_tokens, slots_free, self._block_tokens)
        if self._chunk == sys.maxsize:
            return memory
        left = max(0, self._chunk - sum(request.prefill_left or 1 for request in self.running))
        return replace(memory, step_tokens=self._chunk, prompt_tokens_left=left)

    def _slack(self, request: EngineRequest) -> int:
        return -request.load_tokens % self._block_tokens

    def _rounded(self, tokens: int) -> int:
        return tokens + -tokens % self._block_tokens

    def _fits(self, request: EngineRequest) -> bool:
        return self._rounded(request.load_tokens) <= self._free_tokens()

    def _free_tokens(self) -> int:
        return self.kv_tokens - self.used_tokens - bool(self.running) * self._watermark_tokens

    def _held_back(self) -> Set[str]:
        """Running requests that the queue does not let go on."""
        go_on = self._queue.run
        return frozenset() if go_on is None else {r.id for r in self.running} - go_on

    def _still(self) -> Iterator[str]:
        """Requests that hold memory, and do not grow in this step."""
        holding = (r.id for r in (*self._fetching, *self._ready) if self._waiting.get(r.id) is r)
        idle = (r.id for r in self.running if r.prefill_left or r.id in self._paused)
        return chain(holding, idle)
