"""Laws of the engine model with all that an engine has: cache, drafts, windows, chunks, budgets."""

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.engine.engine import Engine
from loadgen.engine.kv_layers import KvLayers
from loadgen.engine.prefix_cache import Block, PrefixCache, Removed, Stored
from loadgen.engine.request import EngineRequest
from loadgen.engine.schedule import Drafts
from loadgen.engine.stepping import StepGroup, WorkerModel
from loadgen.model.power_model import PowerModel
from router.core.kv_blocks import KvBlocks
from router.core.step_time import StepTime

KV_TOKENS = 96
SLOTS = 4


@dataclass
class Options:
    """One engine's options."""

    block_tokens: int
    cache: bool
    drafts: tuple[float, ...]
    window: tuple[int, int, int] | None
    chunk: int | None
    prompt_budget: int | None
    prefill_every: int
    seed: int

    def engine(self) -> Engine:
        full, sliding, tokens = self.window or (1, 0, 0)
        drafts = len(self.drafts)
        return Engine(
            SLOTS,
            KV_TOKENS,
            block_tokens=self.block_tokens,
            chunk=self.chunk,
            prompt_budget=self.prompt_budget,
            prefix_cache=PrefixCache(events=True) if self.cache else None,
            drafts=Drafts(self.drafts, np.random.default_rng(self.seed)) if drafts else None,
            layers=KvLayers(self.block_tokens, full, sliding, tokens, drafts),
        )


options = st.builds(
    Options,
    block_tokens=st.sampled_from([1, 2, 5]),
    cache=st.booleans(),
    drafts=st.sampled_from([(), (0.9,), (0.8, 0.5, 0.5)]),
    window=st.sampled_from([None, None, (1, 2, 7), (1, 1, 10)]),
    chunk=st.sampled_from([None, 17, 30]),
    prompt_budget=st.sampled_from([None, None, 5]),
    prefill_every=st.sampled_from([1, 1, 3]),
    seed=st.integers(0, 3),
)


@dataclass
class Asked:
    """A request by its content: whose beginning it shares, and how much of it."""

    prompt_tokens: int
    output_tokens: int
    shared: int
    known_output: bool
    kind: int

    def request(self, id_: str, block_tokens: int) -> EngineRequest:
        known = self.prompt_tokens + self.output_tokens * self.known_output
        content = [self.kind if n < self.shared else f"{id_}/{n}" for n in range(known)]
        chain = tuple(
            tuple(content[: (n + 1) * block_tokens]) for n in range(known // block_tokens)
        )
        return EngineRequest(id_, self.prompt_tokens, self.output_tokens, chain=chain)


asked = st.builds(
    Asked,
    prompt_tokens=st.integers(1, 30),
    output_tokens=st.integers(1, 20),
    shared=st.integers(0, 50),
    known_output=st.booleans(),
    kind=st.integers(0, 1),
)
arrivals = st.lists(st.lists(asked, max_size=4), max_size=12)


@dataclass
class Run:
    """Steps an engine to the end of all requests, and checks each step."""

    options: Options
    batches: list[list[Asked]]
    told: list[object] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    computed_tokens: int = 0

    def __post_init__(self) -> None:
        self.engine = self.options.engine()
        self.group = StepGroup(
            [WorkerModel(0, self.engine)],
            StepTime(1.0),
            PowerModel(),
            self.options.prefill_every,
        )
        self.all: dict[str, EngineRequest] = {}
        self.stored: OrderedDict[object, int] = OrderedDict()
        for batch in self.batches:
            for each in batch:
                request = each.request(f"r{len(self.all)}", self.options.block_tokens)
                self.all[request.id] = request
                self.engine.add(request)
            self.step()
        while self.engine.unfinished:
            self.step()

    def step(self) -> None:
        engine, options = self.engine, self.options
        before = {r.id: r.generated_tokens for r in self.all.values()}
        decoding_before = {r.id for r in engine.running if not r.prefill_left}
        step = self.group.begin()
        (part,) = step.parts
        schedule = part.schedule
        self.computed_tokens += schedule.prefill_tokens
        bound = options.chunk
        assert bound is None or schedule.prefill_tokens + schedule.decode_tokens <= bound
        if options.prompt_budget is not None:
            assert schedule.prefill_tokens <= options.prompt_budget
        self.check(engine.kv_tokens)
        self.take_events()
        growing = {r.id for r in engine.running if not r.prefill_left}
        fresh = growing - decoding_before
        decoding = len(growing)
        assert schedule.decode_tokens <= decoding * (1 + len(options.drafts))
        (ended,) = self.group.finish(step)
        for request in self.all.values():
            grown = request.generated_tokens - before[request.id]
            most = 1 if request.id in fresh else 1 + len(options.drafts)
            assert (1 <= grown <= most) == (request.id in growing), request
        self.ended += [request.id for request in ended]
        self.told.append((schedule, self.ended[:]))
        self.take_events()

    def check(self, most_tokens: int) -> None:
        engine, layers = self.engine, self.engine.layers
        running = engine.running
        assert len(running) <= SLOTS
        assert engine.load_tokens == sum(r.load_tokens for r in running)
        read = sum(layers.read(r.load_tokens - r.prefill_left) for r in running) / layers.groups
        assert engine.batch_tokens == pytest.approx(read)
        assert engine.pending_prompt_tokens == engine.waiting_tokens + sum(
            r.prefill_left for r in running
        )
        held: dict[Block, int] = {}
        for request in running:
            for block in request.blocks:
                held[block] = held.get(block, 0) + 1
        assert all(block.holders == count for block, count in held.items())
        own = sum(layers.blocks(r.load_tokens) - len(r.blocks) * layers.full for r in running)
        blocks = own + len(held) * layers.full
        capacity = engine.kv_tokens // layers.block_tokens * layers.groups
        assert blocks <= capacity
        free = (capacity - blocks) * layers.block_tokens // layers.groups
        assert engine.used_tokens == engine.kv_tokens - free <= most_tokens
        for request in running:
            ids = [block.id for block in request.blocks]
            assert ids == list(request.chain[: len(ids)])
            # Never a block that nobody has computed: its own or another one's.
            assert len(ids) * layers.block_tokens <= request.load_tokens - request.prefill_left

    def take_events(self) -> None:
        """Follow the events: what they leave is what the cache finds."""
        cache = self.engine.prefix_cache
        if cache is None:
            return
        for event in cache.take_events():
            if isinstance(event, Stored):
                chain = self.all[event.request].chain
                assert event.ids == tuple(chain[event.first : event.first + len(event.ids)])
                assert event.parent == (chain[event.first - 1] if event.first else None)
                for id_ in event.ids:
                    self.stored[id_] = self.stored.get(id_, 0) + 1
            else:
                assert isinstance(event, Removed)
                self.stored[event.id] -= 1
                if not self.stored[event.id]:
                    del self.stored[event.id]
        for request in self.all.values():
            known = 0
            while known < len(request.chain) and request.chain[known] in self.stored:
                known += 1
            size = self.options.block_tokens
            hits = min(known, (request.prompt_tokens - 1) // size) * size
            assert self.engine.hit_tokens(request.chain, request.prompt_tokens) == hits


@settings(deadline=None)
@given(options, arrivals)
def test_every_request_ends_once_and_memory_is_never_exceeded(
    options: Options, batches: list[list[Asked]]
) -> None:
    run = Run(options, batches)
    engine = run.engine
    assert sorted(run.ended) == sorted(run.all)
    assert all(r.generated_tokens == r.output_tokens for r in run.all.values())
    assert engine.generated_total == sum(r.output_tokens for r in run.all.values())
    assert (engine.load_tokens, engine.used_tokens, engine.batch_tokens) == (0, 0, 0)
    assert engine.pending_prompt_tokens == 0
    assert all(not r.blocks for r in run.all.values())


@settings(deadline=None)
@given(options, arrivals)
def test_computed_and_cached_tokens_are_the_prompts(
    options: Options, batches: list[list[Asked]]
) -> None:
    run = Run(options, batches)
    cached = sum(r.cached_tokens for r in run.all.values())
    prompts = sum(r.prompt_tokens for r in run.all.values())
    assert all(0 <= r.cached_tokens < r.prompt_tokens for r in run.all.values())
    if run.engine.preemptions_total == 0:
        assert run.computed_tokens + cached == prompts
    else:
        assert run.computed_tokens + cached >= prompts - len(run.all)
    cache = run.engine.prefix_cache
    if cache is not None:
        assert cache.hit_tokens == cached
        assert cache.queried_tokens == prompts


@settings(deadline=None)
@given(options, arrivals)
def test_the_same_seed_gives_the_same_run(options: Options, batches: list[list[Asked]]) -> None:
    assert Run(options, batches).told == Run(options, batches).told


@settings(deadline=None)
@given(options, st.integers(1, 200))
def test_blocks_are_those_of_the_groups_that_a_snapshot_shows(
    options: Options, tokens: int
) -> None:
    layers = options.engine().layers
    assert layers.blocks(tokens) == KvBlocks.of(layers.kv_groups(0, 100)).held(tokens)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.booleans()), max_size=40))
def test_the_cache_evicts_what_was_freed_first(
    moves: list[tuple[int, int, bool]],
) -> None:
    cache = PrefixCache()
    held: list[list[Block]] = []
    free: list[object] = []
    for kind, length, release in moves:
        chain = [(kind, n) for n in range(length)]
        found = cache.find(chain, length)
        cache.hold(found)
        for block in found:
            if block in free:
                free.remove(block)
        blocks = list(found)
        if chain[len(blocks) :]:
            cache.store("r", blocks, chain[len(blocks) :])
        held.append(blocks)
        if release:
            freed = held.pop(0)
            cache.release(freed)
            free += [block for block in reversed(freed) if not block.holders]
        if len(free) > 4:
            evicted = free.pop(0)
            cache.evict()
            assert isinstance(evicted, Block)
            assert evicted not in cache.find([evicted.id], 1)
        assert cache.free_blocks == len(free)


def test_a_block_is_found_in_the_step_that_computes_it_and_not_before() -> None:
    engine = Engine(2, 100, block_tokens=4, chunk=6, prefix_cache=PrefixCache())
    chain = ("a", "b", "c")
    engine.add(EngineRequest("first", 12, 2, chain=chain))
    assert engine.hit_tokens(chain, 12) == 0
    engine.schedule()
    assert engine.hit_tokens(chain, 12) == 4  # 6 tokens: one whole block
    engine.advance()
    engine.schedule()
    # The last block would be found too, but one token is always computed.
    assert engine.hit_tokens(chain, 12) == 8
    assert engine.hit_tokens(chain, 13) == 12
    engine.advance()
    engine.add(EngineRequest("second", 12, 2, chain=chain))
    engine.schedule()
    second = engine.running[-1]
    assert (second.id, second.cached_tokens, engine.used_tokens) == ("second", 8, 8 + 2 * 8 - 4)


def test_the_cache_is_forgotten_only_while_no_memory_is_in_use() -> None:
    engine = Engine(1, 100, block_tokens=4, prefix_cache=PrefixCache())
    engine.add(EngineRequest("a", 9, 1, chain=("a", "b")))
    engine.schedule()
    assert not engine.reset_prefix_cache()
    engine.advance()
    assert engine.hit_tokens(("a", "b"), 9) == 8
    assert engine.reset_prefix_cache()
    assert engine.hit_tokens(("a", "b"), 9) == 0
    assert engine.used_tokens == 0


def test_prompts_that_begin_together_share_what_the_step_computes() -> None:
    engine = Engine(2, 100, block_tokens=4, prefix_cache=PrefixCache())
    for name in ("first", "second"):
        engine.add(EngineRequest(name, 9, 1, chain=("a", "b")))
    schedule = engine.schedule()
    assert schedule.prefill_tokens == 9 + 1
    assert [r.cached_tokens for r in engine.running] == [0, 8]


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    engine = Engine(2, 40, block_tokens=4, prefix_cache=PrefixCache())
    old = EngineRequest("old", 16, 20)
    new = EngineRequest("new", 16, 8, chain=("a", "b", "c", "d", "e"))
    engine.add(old)
    engine.add(new)
    preempted: tuple[str, ...] = ()
    for _ in range(6):
        preempted += engine.schedule().preempted
        engine.advance()
    assert preempted == ("new",)
    assert new.cached_tokens == 0
    tokens = 0
    while new.generated_tokens < 8:
        schedule = engine.schedule()
        if schedule.admitted:
            tokens = schedule.prefill_tokens
        engine.advance()
    assert tokens == 16 + 5 - 4  # the others were evicted, its last ones first


def test_prompts_wait_for_their_step_while_requests_decode() -> None:
    engine = Engine(4, 100, chunk=10)
    group = StepGroup([WorkerModel(0, engine)], StepTime(1.0), PowerModel(), prefill_every=3)
    engine.add(EngineRequest("a", 4, 9))
    computed = []
    for number in range(7):
        if number == 1:
            engine.add(EngineRequest("b", 15, 2))
        step = group.begin()
        computed.append(step.parts[0].schedule.prefill_tokens)
        group.finish(step)
    assert computed == [4, 0, 0, 9, 0, 0, 6]
