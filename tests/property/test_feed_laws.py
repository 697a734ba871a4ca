"""A feed equals its engine once it has had what it asked for, whatever was lost on the way."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from router.core.state.feed import Feed
from router.core.types import Snapshot
from router.core.wire import request_token
from tests.support.core import part
from tests.support.engine_model import EngineModel

# Per step: prompts that arrive, and which of those present finish, are preempted, are aborted; and
# how many tokens those in decode gain.
GAINS = st.one_of(st.just([1]), st.lists(st.integers(0, 4), min_size=1, max_size=3))
STEPS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 120), max_size=2),
        st.sets(st.integers(0, 7), max_size=2),
        st.sets(st.integers(0, 7), max_size=1),
        st.sets(st.integers(0, 7), max_size=1),
        GAINS,
    ),
    min_size=1,
    max_size=12,
)
Step = tuple[list[int], set[int], set[int], set[int], list[int]]


def run(steps: Sequence[Step]) -> list[tuple[Snapshot, Snapshot, EngineModel]]:
    """After each step the delta, the full snapshot, and an engine that has come as far."""
    story = []
    for length in range(1, len(steps) + 1):
        engine, number = EngineModel("e1", slots=4), 0
        for arriving, finish, preempt, abort, gains in steps[:length]:
            for prompt_tokens in arriving:
                number += 1
                foreign = number % 3 == 0
                engine.submit(f"theirs-{number}" if foreign else part(number), prompt_tokens)
            chosen = dict(enumerate(engine.ids))
            for index in abort & chosen.keys():
                engine.abort(chosen[index])
            picked = [
                [chosen[i] for i in sorted(some & chosen.keys())] for some in (finish, preempt)
            ]
            delta = engine.step(picked[0], picked[1], gains)
        story.append((delta, engine.full(), engine))
    return story


def agree(feed: Feed, engine: EngineModel) -> None:
    assert feed.load_tokens == engine.load_tokens
    assert feed.resident_tokens == engine.load_tokens - sum(
        one.prefill_left for one in engine.running.values()
    )
    assert (feed.running, feed.waiting) == (len(engine.running), len(engine.waiting))
    tokens = [token for engine_id in engine.running if (token := request_token(engine_id))]
    assert sum(feed.running_by_token.values()) == len(tokens)
    for engine_id, one in engine.running.items():
        if token := request_token(engine_id):
            assert feed.generated_by_token(token) == one.generated_tokens


@given(STEPS)
def test_after_every_delta_the_feed_is_the_engine(steps: Sequence[Step]) -> None:
    feed = Feed()
    for index, (delta, full, engine) in enumerate(run(steps)):
        feed.apply(delta, 0.0)
        agree(feed, engine)
        assert feed.full_wanted is (index == 0)
        if index == 0:
            feed.apply(full, 0.0)


@given(STEPS, st.data())
def test_whatever_was_lost_a_full_snapshot_mends_it(
    steps: Sequence[Step], data: st.DataObject
) -> None:
    feed = Feed()
    story = run(steps)
    for delta, full, _ in story:
        for message in data.draw(st.lists(st.sampled_from([delta, full]), max_size=2)):
            feed.apply(message, 0.0)
            assert feed.load_tokens >= feed.resident_tokens >= 0
            assert feed.step_load_tokens >= 0
    _, full, engine = story[-1]
    feed.apply(full, 0.0)
    assert not feed.full_wanted
    agree(feed, engine)


@given(STEPS, st.data())
def test_what_comes_late_or_twice_changes_nothing(
    steps: Sequence[Step], data: st.DataObject
) -> None:
    feed = Feed()
    sent: list[Snapshot] = []
    for delta, full, engine in run(steps):
        feed.apply(delta, 0.0)
        late = data.draw(st.lists(st.sampled_from([*sent, delta]), max_size=3))
        assert [feed.apply(message, 1.0) for message in late] == [None] * len(late)
        agree(feed, engine)
        sent += [delta, full]


@given(STEPS, st.sets(st.integers(1, 12)))
def test_what_is_complete_never_counts_again(steps: Sequence[Step], complete: set[int]) -> None:
    feed = Feed()
    forgotten = {part(number) for number in complete}
    for engine_id in forgotten:
        feed.forget(request_token(engine_id) or "")
    for delta, full, engine in run(steps):
        counted = sum(one.tokens for i, one in engine.running.items() if i not in forgotten)
        for message in (delta, full):
            feed.apply(message, 0.0)
            assert feed.load_tokens == counted
