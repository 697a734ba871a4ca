"""One engine with continuous batching, as a pure model: no clock, no I/O, no text.

As in vLLM, requests wait by (priority, arrival) and enter while a slot and KV memory are free. Each
grows by a token a step. When memory would overflow, the last one admitted waits again, and later
recomputes its tokens.

With a chunk, a step computes at most that many tokens: one for each decoding request, the rest for
prompts, which hold memory for all their tokens from the start. The step that computes a prompt's
last token yields the first output token. With a prefix cache, a request computes only what it does
not find there, and always its last token.

The KV of a prompt on another engine (``EngineRequest.fetch``) is fetched as in vLLM 0.32: once the
request is first in the queue and a slot and memory are free, but for the blocks that are cached
here. It waits with its memory but without a slot, and enters before all without memory. A step
costs per event (an entry, an end, a computed prompt), not per running request, except with drafts
or paused requests.
"""

from collections.abc import Hashable, Sequence, Set
from itertools import chain, count

from engine_patches.admission.ledger import Memory
from loadgen.engine.kv_handoff import KeptKv
from loadgen.engine.kv_layers import KvLayers
from loadgen.engine.kv_memory import KvMemory
from loadgen.engine.prefix_cache import PrefixCache
from loadgen.engine.queues import EngineOrder, Eviction, Queue
from loadgen.engine.request import EngineRequest, Growth
from loadgen.engine.schedule import Budget, Drafts, Schedule
from loadgen.engine.transfers import Transfers
from router.core.kv_blocks import KvBlocks
from router.core.types import KvGroup
from router.core.wire import request_token

_UNBOUNDED = 1 << 62  # tokens


class Engine:
    """Slots, KV memory and a waiting queue; a step is ``schedule`` and then ``advance``.

    Each engine needs a queue and a prefix cache of its own.
    """

    def __init__(
        self,
        slots: int,
        kv_tokens: int,  # memory, if every layer kept every token
        *,
        block_tokens: int = 1,
        # Most tokens of a step, above those of ``slots`` that decode, with their drafts.
        chunk: int | None = None,
        prompt_budget: int | None = None,  # most prompt tokens of a step
        long_prefill_token_threshold: int | None = None,  # most of them of one request
        lease_s: float = 0.0,  # unfetched KV stays for so long, engine seconds
        recompute: bool = False,  # a prompt whose fetch fails is computed here; else it fails
        watermark: float = 0.0,  # share of blocks kept free when a request joins others, as in vLLM
        # A step computes prompts or decodes, as vLLM before V1; else prompts fill the step.
        prefill_first: bool = False,
        eviction: Eviction | None = None,
        queue: Queue | None = None,  # None: vLLM's order
        prefix_cache: PrefixCache | None = None,  # None: nothing is shared or found again
        drafts: Drafts | None = None,  # None: a token per request and step
        layers: KvLayers | None = None,  # with the same blocks; None: all keep every token
    ) -> None:
        self.slots = slots
        self.layers = layers or KvLayers(block_tokens, drafts=drafts.count if drafts else 0)
        self.kv_tokens = kv_tokens // block_tokens * block_tokens
        self.prefix_cache = prefix_cache
        self.running: list[EngineRequest] = []
        self.kept = KeptKv(lease_s, prefix_cache)
        self.load_tokens = self.waiting_tokens = 0
        self.waiting_routed = 0  # waiting requests that routers have sent
        self.preemptions_total = self.generated_total = 0
        self.lost_total = 0  # generated tokens that evictions discarded
        self.prompt_budget = prompt_budget  # may change between steps
        self._prompt_chunk = long_prefill_token_threshold
        blocks = kv_tokens // block_tokens * self.layers.groups
        self._memory = KvMemory(blocks, self.layers, prefix_cache, self.kept)
        self.kv = KvBlocks.of(self.layers.kv_groups(0, blocks))  # blocks that requests take
        self._chunk = _UNBOUNDED if chunk is None else chunk
        self.transfers = Transfers(self._memory, recompute=recompute)
        self._watermark_blocks = int(watermark * (kv_tokens // block_tokens)) * self.layers.groups
        self._prefill_first = prefill_first
        self._eviction = eviction or Eviction()
        self._queue = queue or EngineOrder()
        self.admission = self._queue.admission
        self._drafts = drafts
        self._growth = Growth(self.layers, caches=prefix_cache is not None)
        # Running requests whose prompts are being computed, in the order of entry.
        self._prefilling: dict[EngineRequest, None] = {}
        self._prefill_tokens = 0
        self._read_tokens = 0
        self._paused: Set[str] = frozenset()
        self._still: list[EngineRequest] = []
        # Requests that began to decode in this step, without a draft.
        self._fresh: set[EngineRequest] = set()
        self._here: dict[str, EngineRequest] = {}
        self._waiting: dict[str, EngineRequest] = {}
        self._capacity_bound = False
        self._arrivals = count()

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot, with or without their KV."""
        return len(self._waiting)

    @property
    def used_tokens(self) -> int:
        free = self._memory.available * self.layers.block_tokens
        return self.kv_tokens - free // self.layers.groups

    @property
    def kv_groups(self) -> tuple[KvGroup, ...]:
        """Memory as a snapshot shows it."""
        return self._memory.kv_groups

    @property
    def pending_prompt_tokens(self) -> int:
        """Tokens of prompts, running and waiting, that are not computed; hits to come count."""
        return self._prefill_tokens + self.waiting_tokens

    @property
    def batch(self) -> Sequence[EngineRequest]:
        """Requests that take part in the current step."""
        if not self._paused:
            return self.running
        return [request for request in self.running if request.id not in self._paused]

    @property
    def batch_tokens(self) -> float:
        """KV tokens that the current step's attention reads: those computed by its end."""
        read = self.layers.read
        if self._paused:
            tokens = sum(read(each.load_tokens - each.prefill_left) for each in self.batch)
        else:
            tokens = self._read_tokens
            for request in self._prefilling:
                whole = request.load_tokens
                tokens -= read(whole) - read(whole - request.prefill_left)
        return tokens if self.layers.groups == 1 else tokens / self.layers.groups

    @property
    def admissible_blocks(self) -> int:
        """Blocks of requests that would still be admitted."""
        free = self._memory.available - self._watermark()
        return max(0, min(self._queue.admissible_blocks(self._room()), free))

    @property
    def unfinished(self) -> bool:
        """Whether there is work; a running transfer counts, as vLLM's engines poll it."""
        return bool(self.running or self._waiting or self.transfers.moving)

    @property
    def may_defer_prefills(self) -> bool:
        """Whether a step without prompts makes sense, by vLLM's rule for its prefill interval.

        It does while requests decode, unless the last step with prompts left requests waiting.
        """
        return bool(self._growth.requests) and not self._capacity_bound

    def hit_tokens(self, ids: Sequence[Hashable], prompt_tokens: int) -> int:
        """Prompt tokens that a request with this chain would find computed, if it entered now."""
        return self._memory.hit_tokens(ids, prompt_tokens)

    def add(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            ValueError: it could never fit, or its id is already known.
        """
        if (
            request.output_tokens < 1
            or self.layers.blocks(request.peak_tokens) > self._memory.blocks
        ):
            raise ValueError(f"request {request.id} can never fit in {self.kv_tokens} KV tokens")
        if request.id in self._waiting or request.id in self._here:
            raise ValueError(f"request {request.id} is already here")
        request.arrival = next(self._arrivals)
        request.cap_tokens = request.cap_tokens or self.kv_tokens - request.prompt_tokens + 1
        self._wait(request)
        self._queue.arrived(request)

    def abort(self, request_id: str) -> bool:
        """Drop a request, waiting or running; False: unknown id.

        Memory that a transfer writes to becomes free when the transfer ends.
        """
        waiting = self._waiting.get(request_id)
        if waiting is not None:
            self._stop_waiting(waiting)
            self._queue.left(waiting)
            self.transfers.withdraw(waiting)
            return True
        running = self._here.get(request_id)
        if running is None:
            return False
        self._release(running)
        self._queue.left(running)
        return True

    def reset_prefix_cache(self) -> bool:
        """Forget what is cached; False: not while memory is in use, as in vLLM."""
        return self._memory.forget_cached()

    def die(self, now_s: float) -> None:
        """Lose all state; leases on other engines' KV are no longer renewed."""
        self.kept.lose()
        for request in (*self._waiting.values(), *self.transfers.moving):
            if request.fetch is not None:
                request.fetch.die(now_s)

    def schedule(self, now_s: float = 0.0, *, prefill: bool = True) -> Schedule:
        """Begin a step: preempt until the running requests fit, else admit waiting ones."""
        self.kept.expire(now_s)
        failed = self.transfers.end(now_s, self._waiting)
        for request in failed:
            self._queue.left(request)
            self._stop_waiting(request)
        self._memory.settle()
        preempted = self._preempt()
        for request in self._growth.full_blocks():
            self._memory.store(request)
            self._growth.expect_full_block(request)
        self._queue.open(self._room(), now_s)
        prompts = 0 if not prefill else self.prompt_budget
        self._fresh.clear()
        drafts = self._drafts.count if self._drafts else 0
        budget = Budget(self._chunk, prompts, drafts, self._prompt_chunk)
        self._pause(self._queue.run)
        prefilling = [r for r in self._prefilling if r.id not in self._paused]
        decoding = len(self._growth.requests)
        if not self._prefill_first:
            budget.decode(decoding)
        for request in prefilling:
            self._compute(request, budget)
        admitted = [] if preempted else self._admit(now_s, budget)
        if prefill:
            self._capacity_bound = bool(self._waiting)
        if self._prefill_first and budget.prefill_tokens:
            computed = {request.id for request in (*prefilling, *admitted)}
            self._pause(computed)
        elif self._prefill_first:
            budget.decode(decoding)
        return Schedule(
            admitted=tuple(request.id for request in admitted),
            preempted=tuple(request.id for request in preempted),
            prefill_tokens=budget.prefill_tokens,
            decode_tokens=budget.decode_tokens,
            failed=tuple(request.id for request in failed),
            wake_s=self._queue.wake_s,
        )

    def advance(self, now_s: float = 0.0) -> list[EngineRequest]:
        """End the step: each computed prompt gains a token; return the ended requests."""
        further = self._accept() if self._drafts is not None else ()
        grown = len(self._growth.requests)
        finished, blocks, read_tokens = self._growth.step()
        self.load_tokens += grown
        self.generated_total += grown
        self._read_tokens += read_tokens
        # Requests that hold memory but do not grow in this step.
        holding = self.transfers.holding(self._waiting)
        idle = (r.id for r in self.running if r.prefill_left or r.id in self._paused)
        self._queue.stepped(chain(holding, idle))
        for request in further:
            self._queue.resized(request)
        if len(finished) > 1:
            finished.sort(key=self.running.index)
        for request in finished:
            self._stop(request)
            self._queue.left(request)
            if request.keeps_kv:
                self._memory.keep(request, request.peak_tokens, now_s)
            else:
                self._memory.release(request, request.peak_tokens)
        self._memory.take(blocks)
        return finished

    def _accept(self) -> list[EngineRequest]:
        """Add accepted drafts; the token of the step itself comes after them."""
        assert self._drafts is not None
        further, layers = [], self.layers
        requests = [r for r in self._growth.requests if r not in self._fresh]
        for request, accepted in zip(requests, self._drafts.accepted(len(requests)), strict=True):
            more = min(accepted, request.output_tokens - request.generated_tokens - 1)
            if not more:
                continue
            before = request.load_tokens
            self._growth.gain(request, more)
            self.load_tokens += more
            self.generated_total += more
            self._read_tokens += layers.read(before + more) - layers.read(before)
            self._memory.grow(before, before + more)
            further.append(request)
        return further

    def _pause(self, go_on: Set[str] | None) -> None:
        """Let only these running requests take part in the step; None: all."""
        for request in self._still:
            if request.id in self._here and request.growth is None:
                self._growth.join(request)
        self._still = []
        self._paused = frozenset() if go_on is None else self._here.keys() - go_on
        if self._paused:
            growing = self._growth.requests
            self._still = [request for request in growing if request.id in self._paused]
            for request in self._still:
                self._growth.leave(request)

    def _compute(self, request: EngineRequest, budget: Budget) -> None:
        """Compute as much of a running request's prompt as fits."""
        left = budget.prefill(request.prefill_left)
        self._prefill_tokens -= request.prefill_left - left
        request.prefill_left = left
        self._memory.store(request)
        if not left:
            self._prefilling.pop(request, None)
            self._decode(request)

    def _decode(self, request: EngineRequest) -> None:
        self._growth.join(request)
        self._fresh.add(request)

    def _preempt(self) -> list[EngineRequest]:
        preempted = []
        while self._memory.available < 0:
            for request in self._eviction.victims(self.running):
                self._release(request)
                request.preemptions += 1
                if self._eviction.restart:
                    self.lost_total += request.generated_tokens
                    request.generated_tokens = 0
                self._wait(request)
                self._queue.preempted(request)
                preempted.append(request)
            self._memory.settle()
        self.preemptions_total += len(preempted)
        return preempted

    def _admit(self, now_s: float, budget: Budget) -> list[EngineRequest]:
        admitted: list[EngineRequest] = []
        while self._waiting and len(self.running) < self.slots and budget.left > 0:
            request = self._next(now_s, budget)
            if request is None:
                break
            self._stop_waiting(request)
            self.load_tokens += request.load_tokens
            self._read_tokens += self.layers.read(request.load_tokens)
            self.running.append(request)
            self._here[request.id] = request
            if request.prefill_left:
                self._prefill_tokens += request.prefill_left
                self._prefilling[request] = None
                self._compute(request, budget)
            else:
                budget.decode(1)
                self._memory.store(request)
                self._decode(request)
            admitted.append(request)
        return admitted

    def _next(self, now_s: float, budget: Budget) -> EngineRequest | None:
        """The next request to run; those that hold memory go first.

        Transfers of requests ahead of it begin here.
        """
        if ready := self.transfers.ready:
            if ready[0].prefill_left and not budget.prompts_left:
                return None
            return self.transfers.start()
        while (head := self._queue.head()) is not None:
            if head.fetch is None and not budget.prompts_left:
                return None
            if not self._memory.place(head, self._watermark()):
                return None
            self._queue.entered(head)
            if head.fetch is None:
                return head
            self.transfers.begin(head, now_s)
        return None

    def _wait(self, request: EngineRequest) -> None:
        self._waiting[request.id] = request
        self.waiting_routed += request_token(request.id) is not None
        self.waiting_tokens += request.load_tokens

    def _stop_waiting(self, request: EngineRequest) -> None:
        del self._waiting[request.id]
        self.waiting_routed -= request_token(request.id) is not None
        self.waiting_tokens -= request.load_tokens

    def _release(self, request: EngineRequest) -> None:
        """Stop a request and free its memory."""
        self._stop(request)
        self._memory.release(request, request.load_tokens)

    def _stop(self, request: EngineRequest) -> None:
        self.running.remove(request)
        del self._here[request.id]
        if request.growth is not None:
            self._growth.leave(request)
        self._prefilling.pop(request, None)
        self._prefill_tokens -= request.prefill_left
        request.prefill_left = 0
        self.load_tokens -= request.load_tokens
        self._read_tokens -= self.layers.read(request.load_tokens)

    def _watermark(self) -> int:
        return self._watermark_blocks if self.running else 0

    def _room(self) -> Memory:
        decoding = len(self.running) - len(self._prefilling)
        busy = self._prefill_tokens + decoding * (1 + self.layers.drafts)
        bounded = self._chunk != _UNBOUNDED
        room = Memory(
            self._memory.blocks,
            self._memory.blocks - self._memory.available,
            max(0, self.slots - len(self.running) - len(self.transfers.ready)),
            self.kv,
            self._chunk if bounded else 0,
            max(0, self._chunk - busy) if bounded else 0,
            0 if self.prefix_cache is None else self.layers.block_tokens,
            lambda ticket: self._memory.held_blocks(ticket.prefix, ticket.entry_tokens),
            self._prompt_chunk or 0,
        )
        budget = self.prompt_budget
        return room.under(budget, len(self.running), self._prefill_tokens) if budget else room
