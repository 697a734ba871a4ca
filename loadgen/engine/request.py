"""One sequence in an engine, and the sequences that grow by a token a step."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from loadgen.engine.kv_handoff import Fetch
from loadgen.engine.kv_layers import KvLayers
from loadgen.engine.prefix_cache import Block


@dataclass(slots=True, eq=False)
class EngineRequest:
    """One sequence; the model knows its length in advance."""

    id: str
    prompt_tokens: int
    output_tokens: int  # at least 1
    priority: int = 0  # lower goes first
    arrival: int = 0  # position in the order of arrival; ``Engine.add`` sets it
    keeps_kv: bool = False  # whether its KV stays for another engine after its end
    # Transfer of its prompt's KV from another engine; None: no transfer, or ended.
    fetch: Fetch | None = None
    fetched_s: float = 0.0  # end of the running transfer, engine seconds
    prefill_left: int = 0  # tokens to compute, or recompute, before its next output token
    # Output bound for admission, which cannot see ``output_tokens``; 0: memory only.
    cap_tokens: int = 0
    hint_tokens: int | None = None  # output length that its client predicts, for admission
    kind: int = 0
    arrived_s: float = 0.0  # time of arrival, engine seconds, for admission
    # An id for each of its full blocks, of the prompt and then of as much of the output as is
    # known; equal ids mean equal tokens up to the block's end.
    chain: Sequence[Hashable] = ()
    cached_tokens: int = 0  # prompt tokens that it found computed when it entered first
    preemptions: int = 0  # number of times that it lost its memory
    # Its leading blocks that are in the prefix cache, while it holds memory.
    blocks: list[Block] = field(default_factory=list, init=False, repr=False)
    # The set that it grows with; None: it does not decode.
    growth: Growth | None = field(default=None, init=False, repr=False)
    _generated: int = field(default=0, init=False, repr=False)

    @property
    def generated_tokens(self) -> int:
        growth = self.growth
        return self._generated if growth is None else self._generated + growth.steps

    @generated_tokens.setter
    def generated_tokens(self, tokens: int) -> None:
        self._generated = tokens if self.growth is None else tokens - self.growth.steps

    @property
    def load_tokens(self) -> int:
        """KV tokens that it holds while it runs."""
        return self.prompt_tokens + self.generated_tokens

    @property
    def peak_tokens(self) -> int:
        """Most KV tokens that it ever holds."""
        return self.prompt_tokens + self.output_tokens - 1


_Bucket = dict[int, dict[EngineRequest, None]]


class Growth:
    """Requests that decode: each grows by a token a step, at a cost per event, not per request.

    A request's end is known when it joins. Requests that take a new block in the same step, modulo
    the size of a block, are only counted. ``caches``: full blocks of known content are asked for.
    """

    def __init__(self, layers: KvLayers, *, caches: bool = False) -> None:
        self.requests: dict[EngineRequest, None] = {}  # in the order of joining
        self.steps = 0
        self._layers = layers
        self._caches = caches
        # Requests by the step in which they take a block; of far ones sliding layers take none.
        self._near, self._far = [0] * layers.block_tokens, [0] * layers.block_tokens
        # Requests that are longer than the window.
        self._long = 0
        self._ends: _Bucket = {}
        self._turns: _Bucket = {}
        self._fills: _Bucket = {}

    def join(self, request: EngineRequest) -> None:
        """From the next step on it grows."""
        generated = request.generated_tokens
        request.growth = self
        request.generated_tokens = generated
        self.requests[request] = None
        self._expect(request)

    def gain(self, request: EngineRequest, tokens: int) -> None:
        """It grows by further tokens, at once; below its end."""
        self._count(request, -1)
        request.generated_tokens += tokens
        self._expect(request)

    def leave(self, request: EngineRequest) -> None:
        self._count(request, -1)
        del self.requests[request]
        generated = request.generated_tokens
        request.growth = None
        request.generated_tokens = generated

    def expect_full_block(self, request: EngineRequest) -> None:
        """Note when its next block of known content is full."""
        if self._caches and len(request.blocks) < len(request.chain):
            missing = (len(request.blocks) + 1) * self._layers.block_tokens - request.load_tokens
            _put(self._fills, self.steps + max(1, missing), request)

    def full_blocks(self) -> list[EngineRequest]:
        """Requests whose next block of known content is full in the step about to begin."""
        size = self._layers.block_tokens
        return [
            request
            for request in self._fills.pop(self.steps, ())
            if request.growth is self and request.load_tokens >= (len(request.blocks) + 1) * size
        ]

    def step(self) -> tuple[list[EngineRequest], int, int]:
        """Grow by a token each.

        Return the requests at their end, which have left; new blocks of the others; tokens that
        attention reads more, summed over the groups of layers.
        """
        layers = self._layers
        self.steps += 1
        for request in self._turns.pop(self.steps, ()):
            if request.growth is self:
                self._turn(request)
        read = len(self.requests) * layers.groups - self._long * layers.sliding
        ended = [
            request
            for request in self._ends.pop(self.steps, ())
            if request.growth is self and request.generated_tokens == request.output_tokens
        ]
        for request in ended:
            self.leave(request)
        phase = (1 - self.steps) % layers.block_tokens
        return ended, self._near[phase] * layers.groups + self._far[phase] * layers.full, read

    def _turn(self, request: EngineRequest) -> None:
        """It grew beyond the window, or beyond what sliding layers take blocks for."""
        if request.load_tokens == self._layers.window_tokens + 1:
            self._long += 1
        if request.load_tokens == self._layers.reach_tokens + 1:
            self._near[self._phase(request)] -= 1
            self._far[self._phase(request)] += 1

    def _expect(self, request: EngineRequest) -> None:
        """Note what happens to it in which step, if it grows by one token in each."""
        self._count(request, 1)
        layers, load = self._layers, request.load_tokens
        end = self.steps + request.output_tokens - request.generated_tokens
        _put(self._ends, end, request)
        if layers.sliding:
            for most in (layers.window_tokens, layers.reach_tokens):
                if load <= most:
                    _put(self._turns, self.steps + most + 1 - load, request)
        self.expect_full_block(request)

    def _count(self, request: EngineRequest, by: int) -> None:
        layers = self._layers
        far = layers.sliding and request.load_tokens > layers.reach_tokens
        (self._far if far else self._near)[self._phase(request)] += by
        if layers.sliding and request.load_tokens > layers.window_tokens:
            self._long += by

    def _phase(self, request: EngineRequest) -> int:
        layers = self._layers
        return (request.load_tokens + layers.drafts - self.steps) % layers.block_tokens


def _put(bucket: _Bucket, step: int, request: EngineRequest) -> None:
    bucket.setdefault(step, {})[request] = None
