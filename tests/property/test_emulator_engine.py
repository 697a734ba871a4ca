from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.engine.engine import Engine
from loadgen.engine.request import EngineRequest

KV_TOKENS = 60
SLOTS = 4

requests = st.builds(
    EngineRequest,
    id=st.just(""),
    prompt_tokens=st.integers(1, 30),
    output_tokens=st.integers(1, 30),
    priority=st.integers(0, 1),
)
arrivals = st.lists(st.lists(requests, max_size=4), max_size=12)


class Run:
    """Feeds arrivals to an engine step by step, checks each step, and notes what happened."""

    def __init__(self, arrivals: list[list[EngineRequest]], slots: int = SLOTS) -> None:
        self.engine = Engine(slots, KV_TOKENS)
        self.all: dict[str, EngineRequest] = {}
        self.finished: Counter[str] = Counter()
        self.tokens = 0
        self.preempted: set[str] = set()
        for batch in arrivals:
            self.arrive(batch)
            self.step()
        while self.engine.unfinished:
            self.step()

    def arrive(self, batch: list[EngineRequest]) -> None:
        for request in batch:
            request.id = f"r{len(self.all)}"
            self.all[request.id] = request
            self.engine.add(request)

    def step(self) -> None:
        engine = self.engine
        before = [request.id for request in engine.running]
        schedule = engine.schedule()
        after = [request.id for request in engine.running]
        kept = before[: len(before) - len(schedule.preempted)]
        assert after == kept + list(schedule.admitted)
        assert list(schedule.preempted) == before[len(kept) :][::-1]
        assert len(after) <= engine.slots
        assert engine.load_tokens == sum(r.load_tokens for r in engine.running) <= KV_TOKENS
        assert after or not engine.waiting
        self.preempted.update(schedule.preempted)
        self.tokens += len(after)
        self.finished.update(request.id for request in engine.advance())


@given(arrivals)
def test_every_request_finishes_once_and_no_token_is_lost(
    batches: list[list[EngineRequest]],
) -> None:
    run = Run(batches)
    assert run.finished == Counter(run.all.keys())
    assert all(r.generated_tokens == r.output_tokens for r in run.all.values())
    assert run.tokens == sum(r.output_tokens for r in run.all.values())
    assert run.preempted <= set(run.finished)
    assert (run.engine.load_tokens, run.engine.waiting, run.engine.waiting_tokens) == (0, 0, 0)


@given(arrivals)
def test_requests_enter_by_priority_then_arrival(batches: list[list[EngineRequest]]) -> None:
    engine = Engine(SLOTS, KV_TOKENS)
    waiting: dict[str, EngineRequest] = {}
    number = 0
    for batch in batches:
        for request in batch:
            request.id = str(number)
            number += 1
            engine.add(request)
            waiting[request.id] = request
        schedule = engine.schedule()
        order = sorted(waiting.values(), key=lambda r: (r.priority, r.arrival))
        assert [r.id for r in order][: len(schedule.admitted)] == list(schedule.admitted)
        for id_ in schedule.admitted:
            del waiting[id_]
        waiting.update({r.id: r for r in batch_of(engine, schedule.preempted)})
        assert engine.waiting == len(waiting)
        assert engine.waiting_tokens == sum(r.load_tokens for r in waiting.values())
        engine.advance()


def batch_of(engine: Engine, ids: tuple[str, ...]) -> list[EngineRequest]:
    return [engine._waiting[id_] for id_ in ids]


@given(arrivals, st.data())
def test_an_aborted_request_leaves_nothing_behind(
    batches: list[list[EngineRequest]], data: st.DataObject
) -> None:
    engine = Engine(SLOTS, KV_TOKENS)
    alive: dict[str, EngineRequest] = {}
    for number, batch in enumerate(batches):
        for place, request in enumerate(batch):
            request.id = f"{number}.{place}"
            engine.add(request)
            alive[request.id] = request
        engine.schedule()
        if alive:
            victim = data.draw(st.sampled_from(sorted(alive)))
            assert engine.abort(victim)
            assert not engine.abort(victim)
            del alive[victim]
        for request in engine.advance():
            del alive[request.id]
        assert len(engine.running) + engine.waiting == len(alive)
        assert engine.load_tokens == sum(r.load_tokens for r in engine.running)
    for id_ in alive:
        engine.abort(id_)
    assert not engine.unfinished
    assert (engine.load_tokens, engine.waiting_tokens) == (0, 0)


def test_the_last_one_in_goes_first_and_keeps_its_tokens() -> None:
    run = Engine(2, 10)
    run.add(EngineRequest("old", 4, 7))
    run.add(EngineRequest("new", 4, 3))
    run.schedule()
    assert run.advance() == []
    assert run.load_tokens == 10
    run.schedule()
    run.advance()
    schedule = run.schedule()
    assert schedule.preempted == ("new",)
    assert (run.waiting, run.waiting_tokens, run.preemptions_total) == (1, 6, 1)
    while run.running[0].id == "old":
        run.advance()
        schedule = run.schedule()
    assert schedule.admitted == ("new",)
    assert schedule.prefill_tokens == 6
    assert [r.id for r in run.advance()] == ["new"]


@pytest.mark.parametrize("request_", [EngineRequest("a", 10, 2), EngineRequest("a", 1, 0)])
def test_what_can_never_fit_is_refused(request_: EngineRequest) -> None:
    with pytest.raises(ValueError, match="never fit"):
        Engine(1, 10).add(request_)


def test_an_id_is_used_once() -> None:
    engine = Engine(1, 10)
    engine.add(EngineRequest("a", 1, 1))
    with pytest.raises(ValueError, match="already"):
        engine.add(EngineRequest("a", 1, 1))
    engine.schedule()
    with pytest.raises(ValueError, match="already"):
        engine.add(EngineRequest("a", 1, 1))
