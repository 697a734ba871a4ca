"""An emulated engine under every admission policy: what holds whoever decides."""

import random
import warnings
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from engine_patches.admission import ADMISSIONS, make_admission, read_admission
from engine_patches.admission.policies.strict import LONGEST_PAUSE_S
from loadgen.engine.engine import Engine
from loadgen.engine.prefix_cache import PrefixCache
from loadgen.engine.queues import Eviction, PolicyOrder
from loadgen.engine.request import EngineRequest

KV_TOKENS = 60
SLOTS = 4
CHUNK = 16
STEP_S = 0.05

AS_PRINTED = (
    {"policy": "wait", "strict": True, "thresholds": [2, 1]},
    {"policy": "nested_wait", "strict": True, "segments": [8], "thresholds": [2, 1]},
)

requests = st.builds(
    EngineRequest,
    id=st.just(""),
    prompt_tokens=st.integers(1, 30),
    output_tokens=st.integers(1, 30),
    priority=st.integers(0, 1),
    hint_tokens=st.none() | st.integers(1, 40),
    kind=st.integers(0, 1),
)
batches = st.lists(st.lists(requests, max_size=4), max_size=12)
settings = st.sampled_from(sorted(ADMISSIONS)).flatmap(
    lambda policy: st.fixed_dictionaries(
        {"policy": st.just(policy)},
        optional={
            key: values
            for key, values in {
                "headroom": st.sampled_from((0.0, 0.05, 0.2)),
                "predict": st.sampled_from(("hint", "cap", "quantile:0.9")),
                "margin": st.sampled_from((0.0, 0.1)),
                "length_margin": st.sampled_from((0.0, 0.5)),
                "ageing": st.sampled_from((0.0, 1.0, 1000.0)),
                "hold_s": st.sampled_from((0.0, 0.2, 1.0)),
                "thresholds": st.sampled_from(([], [2, 1])),
                "segments": st.sampled_from(([], [8])),
            }.items()
            if key in ADMISSIONS[policy].keys
        },
    )
)


class Run:
    """One engine and its policy; a step that computes something takes ``STEP_S``."""

    def __init__(
        self,
        settings: dict[str, object],
        *,
        restart: bool = False,
        prefill_first: bool = False,
        chunk: int | None = CHUNK,
        block: int = 1,
        caches: bool = False,
    ) -> None:
        self.block = block
        self.strict = bool(settings.get("strict"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.queue = PolicyOrder(make_admission(read_admission(settings)))
        self.engine = Engine(
            SLOTS,
            KV_TOKENS,
            block_tokens=block,
            chunk=chunk,
            queue=self.queue,
            eviction=Eviction(restart=restart),
            prefill_first=prefill_first,
            prefix_cache=PrefixCache() if caches else None,
        )
        self.most_computed = SLOTS * KV_TOKENS if chunk is None else chunk
        self.now_s = 0.0
        self.arrived = 0
        self.all: dict[str, EngineRequest] = {}
        self.finished: Counter[str] = Counter()

    def arrive(self, batch: list[EngineRequest]) -> None:
        for request in batch:
            request.id = f"r{self.arrived}"
            self.arrived += 1
            request.arrived_s = self.now_s
            self.all[request.id] = request
            self.engine.add(request)

    def step(self) -> None:
        engine, ledger = self.engine, self.queue.ledger
        schedule = engine.schedule(self.now_s)
        shared = {one for r in engine.running for one in r.blocks}
        own = sum(-(-r.load_tokens // self.block) - len(r.blocks) for r in engine.running)
        assert engine.used_tokens == self.block * (own + len(shared)) <= engine.kv_tokens
        assert len(engine.running) <= SLOTS
        assert [ticket.id for ticket in ledger.running.values()] == [r.id for r in engine.running]
        for request in engine.running:
            assert ledger.size_tokens(ledger.running[request.id]) == request.load_tokens
        assert len(ledger.waiting) == engine.waiting
        computed = schedule.prefill_tokens + schedule.decode_tokens
        assert computed <= self.most_computed
        assert schedule.prefill_tokens <= (engine.prompt_budget or computed)
        if computed:
            self.now_s += STEP_S
            self.finished.update(request.id for request in engine.advance(self.now_s))
        else:
            self.wait(schedule.wake_s)
        admissible = engine.admissible_blocks * self.block
        assert 0 <= admissible <= max(0, KV_TOKENS - engine.used_tokens)

    def wait(self, wake_s: float | None) -> None:
        """Nobody computes: a hold is on, and not for long; or nobody is there."""
        if self.strict and self.engine.unfinished:
            assert wake_s is not None
            assert self.now_s < wake_s <= self.now_s + LONGEST_PAUSE_S
        elif self.engine.unfinished:
            assert not self.engine.running
            assert wake_s is not None
            assert self.now_s < wake_s <= min(r.arrived_s for r in self.waiting()) + 1.0 + 1e-9
        self.now_s = self.now_s + STEP_S if wake_s is None else wake_s

    def waiting(self) -> list[EngineRequest]:
        return [r for r in self.all.values() if r.id not in self.finished]


@given(
    batches,
    settings | st.sampled_from(AS_PRINTED),
    st.booleans(),
    st.booleans(),
    st.sampled_from((1, 4)),
)
def test_every_request_ends_once_within_the_memory(
    batches: list[list[EngineRequest]],
    settings: dict[str, object],
    restart: bool,
    prefill_first: bool,
    block: int,
) -> None:
    run = Run(settings, restart=restart, prefill_first=prefill_first, block=block)
    for batch in batches:
        run.arrive(batch)
        run.step()
    while run.engine.unfinished:
        run.step()
    engine, ledger = run.engine, run.queue.ledger

    assert run.finished == Counter(run.all.keys())
    assert all(r.generated_tokens == r.output_tokens for r in run.all.values())
    outputs = sum(r.output_tokens for r in run.all.values())
    assert engine.generated_total - engine.lost_total == outputs
    assert ledger.preempted_total == engine.preemptions_total
    assert (engine.used_tokens, engine.waiting, len(ledger.running)) == (0, 0, 0)


@given(batches, settings, st.data())
def test_a_request_that_is_withdrawn_leaves_nothing_behind(
    batches: list[list[EngineRequest]], settings: dict[str, object], data: st.DataObject
) -> None:
    run = Run(settings)
    for batch in batches:
        run.arrive(batch)
        run.step()
        alive = sorted(r.id for r in run.waiting())
        if alive:
            victim = data.draw(st.sampled_from(alive))
            assert run.engine.abort(victim)
            assert not run.engine.abort(victim)
            del run.all[victim]
    for request in run.waiting():
        run.engine.abort(request.id)

    assert not run.engine.unfinished
    assert (run.engine.used_tokens, run.engine.waiting_tokens) == (0, 0)
    assert (len(run.queue.ledger.waiting), len(run.queue.ledger.running)) == (0, 0)


@given(batches, st.sampled_from((None, CHUNK)), st.sampled_from((1, 4)))
def test_with_right_lengths_a_policy_that_checks_memory_never_evicts(
    batches: list[list[EngineRequest]], chunk: int | None, block: int
) -> None:
    run = Run({"policy": "memory_checked"}, chunk=chunk, block=block)
    for batch in batches:
        for request in batch:
            request.hint_tokens = request.output_tokens
        run.arrive(batch)
        run.step()
    while run.engine.unfinished:
        run.step()

    assert run.engine.preemptions_total == 0


def share(request: EngineRequest, family: int, block: int) -> None:
    """Its prompt begins like those of its family."""
    blocks = request.prompt_tokens // block
    request.chain = [(family, at) for at in range(blocks)]


def surge_of(count: int, seed: int) -> list[EngineRequest]:
    rng = random.Random(seed)
    return [EngineRequest("", rng.randint(1, 30), rng.randint(1, 30)) for _ in range(count)]


surges = st.builds(surge_of, st.integers(10, 30), st.integers(0, 1 << 20))
budgets = st.lists(st.sampled_from((None, 1, 5, 12)), min_size=1, max_size=8)


@given(
    before=batches,
    surge=surges,
    settings=settings,
    right=st.booleans(),
    block=st.sampled_from((1, 4)),
    budgets=budgets,
    families=st.integers(1, 3),
)
def test_a_surge_with_prefixes_and_budgets_keeps_to_the_memory(
    before: list[list[EngineRequest]],
    surge: list[EngineRequest],
    settings: dict[str, object],
    right: bool,
    block: int,
    budgets: list[int | None],
    families: int,
) -> None:
    run, steps = Run(settings, block=block, caches=True), 0

    def step() -> None:
        nonlocal steps
        run.engine.prompt_budget = budgets[steps % len(budgets)]
        steps += 1
        run.step()

    for number, request in enumerate([one for batch in (*before, surge) for one in batch]):
        share(request, number % families, block)
        if right:
            request.hint_tokens = request.output_tokens
    for batch in (*before, surge):
        run.arrive(batch)
        step()
    while run.engine.unfinished:
        step()

    assert run.finished == Counter(run.all.keys())
    assert run.engine.used_tokens == 0
    exact = settings.get("predict", "hint") == "hint" and not settings.get("length_margin")
    if right and exact and settings["policy"] == "memory_checked":
        assert run.engine.preemptions_total == 0


@given(batches)
def test_a_policy_that_leaves_it_to_the_engine_changes_nothing(
    batches: list[list[EngineRequest]],
) -> None:
    own = Engine(SLOTS, KV_TOKENS, chunk=CHUNK)
    run = Run({"policy": "off"})
    for batch in [*batches, *[[]] * 2000]:
        run.arrive(batch)
        for request in batch:
            own.add(
                EngineRequest(
                    request.id, request.prompt_tokens, request.output_tokens, request.priority
                )
            )
        if not batch and not own.unfinished:
            break
        assert own.schedule() == run.engine.schedule(run.now_s)
        assert [r.id for r in own.advance()] == [r.id for r in run.engine.advance()]
    assert own.preemptions_total == run.engine.preemptions_total
