"""One engine with continuous batching, as a pure model: no clock, no I/O, no text.

As in vLLM, requests wait by (priority, arrival) and enter while a slot and KV memory are free. Each
grows by a token a step. When memory would overflow, the last one admitted waits again, and later
recomputes its tokens.

With a chunk, a step computes at most that many tokens: one for each decoding request, the rest for
prompts, which hold memory for all their tokens from the start. The step that computes a prompt's
last token yields the first output token.

The KV of a prompt on another engine (``EngineRequest.fetch``) is fetched as in vLLM 0.32: once the
request is first in the queue and a slot and memory are free. It waits with its memory but without a
slot, and enters before all without memory.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain, count

from engine_patches.admission.ledger import Memory
from loadgen.engine.kv_handoff import Fetch, KeptKv
from loadgen.engine.queues import EngineOrder, Eviction, Queue
from loadgen.engine.schedule import Budget, Schedule
from router.core.wire import request_token

_UNBOUNDED = 1 << 62  # tokens


@dataclass(slots=True, eq=False)
class EngineRequest:
    """One sequence; the model knows its length in advance.

    Attributes:
        output_tokens: at least 1.
        priority: lower goes first.
        arrival: position in the order of arrival; ``Engine.add`` sets it.
        keeps_kv: whether its KV stays for another engine after its end.
        fetch: transfer of its prompt's KV from another engine; None: no transfer, or ended.
        fetched_s: end of the running transfer, engine seconds.
        prefill_left: tokens to compute, or recompute, before its next output token.
        cap_tokens: output bound for admission, which cannot see ``output_tokens``; 0: memory only.
        hint_tokens: output length that its client predicts, for admission.
        arrived_s: time of arrival, engine seconds, for admission.
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
        """Most KV tokens that it ever holds."""
        return self.prompt_tokens + self.output_tokens - 1


class Engine:
    """Slots, KV memory and a waiting queue; a step is ``schedule`` and then ``advance``.

    Args:
        slots: requests that may run at once.
        block_tokens: size of the blocks in which a running request takes memory.
        chunk: upper bound on the tokens of a step, above ``slots``; None: no bound.
        lease_s: time for which unfetched KV stays, engine seconds.
        recompute: whether a prompt is computed here when its fetch fails; else the request fails.
        watermark: share of the blocks kept free when a request joins others, as in vLLM.
        prefill_first: whether a step either computes prompts or decodes, as vLLM before V1; else
            running requests go first and prompts fill the step.
        eviction: rule that selects victims when memory overflows, and what they lose.
        queue: in place of vLLM's order; each engine needs its own.

    Attributes:
        fetching_tokens: memory of requests in transfer, or with KV but without a slot.
        admission: name of the admission policy; None: the engine's own order.
        lost_total: generated tokens that evictions discarded.
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
        # Unused tokens in the last blocks of the running requests.
        self._slack_tokens = 0
        self._chunk = _UNBOUNDED if chunk is None else chunk
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
        """Requests that wait for a slot, with or without their KV."""
        return len(self._waiting)

    @property
    def waiting_routed(self) -> int:
        return sum(request_token(id_) is not None for id_ in self._waiting)

    @property
    def used_tokens(self) -> int:
        running_tokens = self.load_tokens + self._slack_tokens
        return running_tokens + self.fetching_tokens + self.kept.tokens

    @property
    def batch(self) -> Sequence[EngineRequest]:
        """Requests that take part in the current step."""
        if not self._paused:
            return self.running
        return [request for request in self.running if request.id not in self._paused]

    @property
    def batch_tokens(self) -> int:
        if not self._paused:
            return self.load_tokens
        return sum(request.load_tokens for request in self.batch)

    @property
    def admissible_tokens(self) -> int:
        """Prompt tokens that would still be admitted."""
        return max(0, min(self._queue.admissible_tokens(self._memory()), self._free_tokens()))

    @property
    def unfinished(self) -> bool:
        """Whether there is work; a running transfer counts, as vLLM's engines poll it."""
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
        """Drop a request, waiting or running; False: unknown id.

        Memory that a transfer writes to becomes free when the transfer ends.
        """
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self._queue.left(waiting)
            self.waiting_tokens -= waiting.load_tokens
            if waiting in self._ready:
                self._ready.remove(waiting)
                self.fetching_tokens -= waiting.load_tokens
            elif waiting.fetch is not None and waiting not in self._fetching:
                waiting.fetch.cancel()
            return True
        for request in self.running:
            if request.id == request_id:
                self._remove(request)
                return True
        return False

    def die(self, now_s: float) -> None:
        """Lose all state; leases on other engines' KV are no longer renewed."""
        self.kept.lose()
        for request in (*self._waiting.values(), *self._fetching):
            if request.fetch is not None:
                request.fetch.die(now_s)

    def schedule(self, now_s: float = 0.0) -> Schedule:
        """Begin a step: preempt until the running requests fit, else admit waiting ones."""
        self.kept.expire(now_s)
        failed = self._end_fetches(now_s)
        preempted = self._preempt()
        self._queue.open(self._memory(), now_s)
        budget = Budget(self._chunk)
        go_on = self._queue.run
        self._paused = frozenset() if go_on is None else {r.id for r in self.running} - go_on
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
        """End the step: each computed prompt gains a token; return the ended requests."""
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
        # Requests that hold memory but do not grow in this step.
        holding = (r.id for r in (*self._fetching, *self._ready) if self._waiting.get(r.id) is r)
        idle = (r.id for r in self.running if r.prefill_left or r.id in self._paused)
        self._queue.stepped(chain(holding, idle))
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
                self._release(request)
                if self._eviction.restart:
                    self.lost_total += request.generated_tokens
                    request.generated_tokens = 0
                self._wait(request)
                self._queue.preempted(request)
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
        """The next request to run; those that hold memory go first.

        Transfers of requests ahead of it begin here.
        """
        if self._ready:
            request = self._ready.pop(0)
            self.fetching_tokens -= request.load_tokens
            return request
        while (head := self._queue.head()) is not None and (
            self._rounded(head.load_tokens) <= self._free_tokens()
        ):
            self._queue.entered(head)
            if head.fetch is None:
                head.prefill_left = head.load_tokens
                return head
            head.fetched_s = now_s + head.fetch.seconds
            self.fetching_tokens += head.load_tokens
            self._fetching.append(head)
        return None

    def _end_fetches(self, now_s: float) -> list[str]:
        """End the transfers that are due; return the ids of requests that fail with them."""
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

    def _memory(self) -> Memory:
        slots_free = max(0, self.slots - len(self.running) - len(self._ready))
        memory = Memory(self.kv_tokens, self.used_tokens, slots_free, self._block_tokens)
        if self._chunk == _UNBOUNDED:
            return memory
        left = max(0, self._chunk - sum(request.prefill_left or 1 for request in self.running))
        return replace(memory, step_tokens=self._chunk, prompt_tokens_left=left)

    def _slack(self, request: EngineRequest) -> int:
        return -request.load_tokens % self._block_tokens

    def _rounded(self, tokens: int) -> int:
        return tokens + -tokens % self._block_tokens

    def _free_tokens(self) -> int:
        return self.kv_tokens - self.used_tokens - bool(self.running) * self._watermark_tokens
