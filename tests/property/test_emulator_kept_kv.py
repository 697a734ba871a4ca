"""Prefill in chunks, KV kept for others and fetched by them, as laws of the pure engines."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.engine.engine import Engine
from loadgen.engine.kv_handoff import Fetch, KeptKv, TransferTime
from loadgen.engine.kv_layers import KvLayers
from loadgen.engine.prefix_cache import PrefixCache
from loadgen.engine.request import EngineRequest

KV_TOKENS = 60
SLOTS = 3
CHUNK = 7
LEASE_S = 9.0
TRANSFER = TransferTime(latency_s=0.5, per_token_s=0.1)


@dataclass
class Pair:
    """One engine that prefills and one that decodes; a step of both is a second."""

    recompute: bool = False
    now_s: float = 0.0
    arrived: int = 0
    ready: list[tuple[str, int]] = field(default_factory=list)
    prompts: dict[str, int] = field(default_factory=dict)
    computed: int = 0
    alive: dict[str, EngineRequest] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prefill = Engine(SLOTS, KV_TOKENS, chunk=CHUNK, lease_s=LEASE_S)
        self.decode = Engine(
            SLOTS, KV_TOKENS, chunk=CHUNK, lease_s=LEASE_S, recompute=self.recompute
        )

    def arrive(self, prompt_tokens: int) -> None:
        id_ = f"p{self.arrived}"
        self.arrived += 1
        self.prompts[id_] = prompt_tokens
        self.prefill.add(EngineRequest(id_, prompt_tokens, 1, keeps_kv=True))

    def hand_over(self, output_tokens: int) -> None:
        """Send the request that was prefilled first on to the other engine."""
        id_, prompt_tokens = self.ready.pop(0)
        fetch = Fetch(self.prefill.kept, id_, TRANSFER, self.now_s)
        request = EngineRequest(f"d{id_}", prompt_tokens, output_tokens, fetch=fetch)
        self.decode.add(request)
        self.alive[request.id] = request

    def abort(self, id_: str) -> None:
        assert self.decode.abort(id_)
        assert not self.decode.abort(id_)
        del self.alive[id_]

    def step(self) -> None:
        schedule = self.prefill.schedule(self.now_s)
        assert schedule.prefill_tokens + schedule.decode_tokens <= CHUNK
        self.computed += schedule.prefill_tokens
        begun = self.decode.schedule(self.now_s)
        assert begun.prefill_tokens + begun.decode_tokens <= CHUNK
        if not self.recompute and not begun.preempted and not self.decode.preemptions_total:
            assert begun.prefill_tokens == 0
        for id_ in begun.failed:
            del self.alive[id_]
            self.failed.append(id_)
        self.check()
        self.now_s += 1.0
        self.ready += [(r.id, r.prompt_tokens) for r in self.prefill.advance(self.now_s)]
        for request in self.decode.advance(self.now_s):
            assert request.generated_tokens == request.output_tokens
            self.ended.append(request.id)
            del self.alive[request.id]
        self.check()

    def check(self) -> None:
        for engine in (self.prefill, self.decode):
            assert len(engine.running) <= SLOTS
            assert min(engine.load_tokens, engine.transfers.tokens, engine.kept.tokens) >= 0
            assert engine.load_tokens == sum(r.load_tokens for r in engine.running)
        assert self.prefill.used_tokens <= KV_TOKENS
        kept = self.prefill.kept
        gone = kept.fetched_total + kept.freed_total + kept.expired_total
        assert kept.kept_total == gone + len(kept)
        assert len(self.alive) == len(self.decode.running) + self.decode.waiting


actions = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.integers(1, 30)),
        st.tuples(st.just("hand_over"), st.integers(1, 30)),
        st.tuples(st.just("step"), st.integers(1, 5)),
        st.tuples(st.just("abort"), st.integers(0, 9)),
    ),
    max_size=40,
)


def act(pair: Pair, action: str, number: int) -> None:
    if action == "arrive":
        pair.arrive(number)
    elif action == "hand_over" and pair.ready:
        pair.hand_over(number)
    elif action == "abort" and pair.alive:
        pair.abort(sorted(pair.alive)[number % len(pair.alive)])
    elif action == "step":
        for _ in range(number):
            pair.step()


@given(actions, st.booleans())
def test_every_token_is_computed_once_and_all_kept_kv_ends_once(
    todo: list[tuple[str, int]], recompute: bool
) -> None:
    pair = Pair(recompute)
    for action, number in todo:
        act(pair, action, number)
    while pair.prefill.unfinished or pair.decode.unfinished:
        pair.step()
    pair.now_s += LEASE_S
    pair.step()
    assert pair.computed == sum(pair.prompts.values())
    assert pair.prefill.kept.kept_total == len(pair.prompts)
    assert len(pair.prefill.kept) == 0
    assert not pair.alive
    assert len(pair.failed) == (0 if recompute else pair.decode.transfers.failed_total)
    assert pair.prefill.used_tokens == pair.decode.used_tokens == 0
    assert pair.prefill.waiting_tokens == pair.decode.waiting_tokens == 0


LAYERS = (KvLayers(4), KvLayers(4, sliding=5, window_tokens=8))
prompts = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 1)), max_size=30)


@given(prompts, st.sampled_from(LAYERS), st.lists(st.integers(0, 99), max_size=30))
def test_kept_kv_takes_the_memory_that_its_request_took(
    prompts: list[tuple[int, int]], layers: KvLayers, fetched: list[int]
) -> None:
    """With windows, and with prompts that begin alike, as many and as long as the memory allows."""
    engine = Engine(
        9,
        KV_TOKENS,
        block_tokens=4,
        chunk=40,
        lease_s=LEASE_S,
        layers=layers,
        prefix_cache=PrefixCache(),
    )
    for number, (tokens, family) in enumerate(prompts):
        chain = [(family, block) for block in range(tokens // 4)]
        engine.add(EngineRequest(f"{number}", tokens, 1, keeps_kv=True, chain=chain))
    kept: list[str] = []
    while engine.unfinished:
        engine.schedule()
        used_tokens = engine.used_tokens
        kept += [request.id for request in engine.advance()]
        assert engine.used_tokens == used_tokens <= KV_TOKENS
        going = kept.pop(fetched.pop() % len(kept)) if kept and fetched else None
        if going or not engine.running:
            assert engine.kept.fetch(going or kept.pop(0))
    assert engine.kept.kept_total == len(prompts)
    for id_ in kept:
        engine.kept.free(id_)
    assert (engine.used_tokens, engine.kept.blocks) == (0, 0)
    assert engine.reset_prefix_cache()


def test_prompts_share_a_step_and_one_prompt_takes_several() -> None:
    engine = Engine(8, 1000, chunk=10)
    for id_, tokens in (("long", 13), ("short", 4), ("next", 9)):
        engine.add(EngineRequest(id_, tokens, 2))
    first = engine.schedule()
    assert (first.admitted, first.prefill_tokens) == (("long",), 10)
    assert [r.prefill_left for r in engine.running] == [3]
    engine.advance()
    assert engine.generated_total == 0
    second = engine.schedule()
    assert (second.admitted, second.prefill_tokens) == (("short", "next"), 10)
    assert [r.prefill_left for r in engine.running] == [0, 0, 6]
    engine.advance()
    third = engine.schedule()
    assert (third.prefill_tokens, third.decode_tokens) == (6, 2)
    assert [r.id for r in engine.advance()] == ["long", "short"]


def handed(tokens: int = 20) -> tuple[Engine, Engine, EngineRequest]:
    """An engine that keeps the KV of "p", one that is to decode, and the request for it."""
    prefill, decode = (Engine(2, 100, chunk=50, lease_s=LEASE_S) for _ in range(2))
    prefill.add(EngineRequest("p", tokens, 1, keeps_kv=True))
    prefill.schedule(0.0)
    prefill.advance(1.0)
    fetch = Fetch(prefill.kept, "p", TRANSFER, 1.0)
    return prefill, decode, EngineRequest("d", tokens, 3, fetch=fetch)


def test_kv_on_its_way_takes_memory_but_no_slot_and_the_prompt_is_not_computed() -> None:
    prefill, decode, request = handed()
    decode.add(request)
    assert decode.schedule(1.0).admitted == ()
    assert (decode.used_tokens, decode.waiting, len(decode.running)) == (20, 1, 0)
    assert prefill.used_tokens == 20
    decode.advance(2.0)
    assert decode.schedule(3.4).admitted == ()
    schedule = decode.schedule(3.5)
    assert (schedule.admitted, schedule.prefill_tokens, schedule.decode_tokens) == (("d",), 0, 1)
    assert prefill.used_tokens == 0
    assert prefill.kept.fetched_total == 1
    decode.advance(4.0)
    assert (request.generated_tokens, decode.used_tokens) == (1, 21)


def test_no_transfer_begins_without_a_slot_or_memory() -> None:
    _, decode, request = handed()
    decode.add(EngineRequest("a", 5, 50))
    decode.add(EngineRequest("b", 76, 2))
    decode.schedule(1.0)
    decode.add(request)
    decode.abort("a")
    decode.schedule(1.5)
    assert decode.transfers.tokens == 20
    decode.add(EngineRequest("c", 1, 9, priority=-1))
    assert decode.schedule(9.0).admitted == ("d",)


def test_a_request_whose_kv_came_can_be_aborted_before_it_has_a_slot() -> None:
    prefill, decode, request = handed()
    decode.add(EngineRequest("a", 5, 50))
    decode.schedule(0.0)
    decode.add(request)
    decode.schedule(1.0)
    decode.add(EngineRequest("b", 5, 50))
    decode.schedule(2.0)
    decode.schedule(3.5)
    assert [r.id for r in decode.running] == ["a", "b"]
    assert (prefill.kept.fetched_total, decode.waiting, decode.used_tokens) == (1, 1, 30)
    assert decode.abort("d")
    assert (decode.waiting, decode.waiting_tokens, decode.used_tokens) == (0, 0, 10)


def test_kv_that_is_claimed_outlives_its_lease() -> None:
    prefill, decode, request = handed()
    decode.add(request)
    assert prefill.kept.expire(100.0) == 0
    decode.die(100.0)
    assert prefill.kept.expire(105.9) == 0
    assert prefill.kept.expire(106.0) == 1


@pytest.mark.parametrize("gone", [False, True])
def test_only_what_is_not_cached_here_is_fetched(*, gone: bool) -> None:
    prefill, _, request = handed()
    cache = PrefixCache()
    decode = Engine(2, 100, block_tokens=5, chunk=50, recompute=True, prefix_cache=cache)
    decode.add(EngineRequest("before", 15, 1, chain=("a", "b", "c")))
    decode.schedule()
    decode.advance()
    request.chain = ("a", "b", "c", "d")
    decode.add(request)
    decode.schedule(1.0)
    assert request.fetched_s == 1.0 + TRANSFER.seconds(20 - 15)
    if gone:
        prefill.die(1.5)
    schedule = decode.schedule(2.0)
    assert schedule.prefill_tokens == (5 if gone else 0)
    assert [r.id for r in decode.running] == ["d"]
    assert decode.used_tokens == 20


@pytest.mark.parametrize("recompute", [False, True])
def test_kv_that_is_gone_fails_the_request_or_is_computed_again(recompute: bool) -> None:
    prefill, _, request = handed()
    decode = Engine(2, 100, chunk=50, recompute=recompute)
    decode.add(request)
    decode.schedule(1.0)
    prefill.die(2.0)
    schedule = decode.schedule(4.0)
    assert decode.transfers.failed_total == 1
    assert schedule.failed == (() if recompute else ("d",))
    assert schedule.prefill_tokens == (20 if recompute else 0)
    assert decode.used_tokens == (20 if recompute else 0)


def test_kv_that_expired_or_never_was_fails_at_once() -> None:
    kept = KeptKv(LEASE_S)
    kept.keep("p", 5, 0.0)
    for source, id_, now_s in ((kept, "p", LEASE_S), (kept, "q", 0.0), (None, "p", 0.0)):
        fetch = Fetch(source, id_, TRANSFER, now_s)
        assert fetch.seconds(9) == 0.0
        assert not fetch.end()
    assert (kept.expired_total, kept.tokens) == (1, 0)


def test_outputs_of_one_prompt_share_what_arrived() -> None:
    kept = KeptKv(LEASE_S)
    kept.keep("p", 5, 0.0)
    fetch = Fetch(kept, "p", TRANSFER, 1.0)
    assert fetch.seconds(5) == pytest.approx(1.0)
    assert (fetch.end(), fetch.end()) == (True, True)
    fetch.cancel()
    fetch.die(2.0)
    assert (kept.fetched_total, kept.freed_total) == (1, 0)


def test_a_death_ends_a_claim_once_however_many_outputs_shared_it() -> None:
    kept = KeptKv(LEASE_S)
    kept.keep("p", 5, 0.0)
    fetch = Fetch(kept, "p", TRANSFER, 1.0)
    fetch.die(2.0)
    fetch.die(2.0)
    assert not fetch.end()
    assert (kept.expire(8.9), kept.expire(9.0)) == (0, 1)


@pytest.mark.parametrize("begun", [False, True])
def test_an_aborted_fetch_frees_both_sides(begun: bool) -> None:
    prefill, decode, request = handed()
    decode.add(request)
    if begun:
        decode.schedule(1.0)
    assert decode.abort("d")
    assert prefill.kept.freed_total == (0 if begun else 1)
    assert (decode.waiting, decode.waiting_tokens, decode.used_tokens) == (0, 0, 20 * begun)
    assert decode.unfinished == begun
    decode.schedule(4.0)
    assert (prefill.kept.freed_total, prefill.used_tokens, decode.used_tokens) == (1, 0, 0)
    assert not decode.unfinished
