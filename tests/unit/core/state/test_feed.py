"""One engine's state from its snapshots, message by message."""

import pytest

from router.core.state.feed import Feed
from router.core.types import Snapshot
from router.core.wire import request_token
from tests.support.core import part, running, snapshot, token

FULL = snapshot("full", 5, running(part(1), 100, 10), running("theirs", 50, 5), slots=8, waiting=2)


def fed(*snapshots: Snapshot) -> Feed:
    feed = Feed()
    for received_s, message in enumerate(snapshots):
        feed.apply(message, float(received_s))
    return feed


@pytest.mark.parametrize(
    "engine_id",
    [
        f"cmpl-{token(7)}-0-1a2b3c4d",
        f"chatcmpl-{token(7)}",
        f"3_chatcmpl-{token(7)}-9f",
        token(7),
    ],
)
@pytest.mark.parametrize("attempt", ["", "r1", "r12"])
def test_the_token_is_found_inside_engine_ids(engine_id: str, attempt: str) -> None:
    told = engine_id.replace(token(7), token(7) + attempt)
    assert request_token(told) == token(7) + attempt


@pytest.mark.parametrize("engine_id", ["", "cmpl-abc-0", "es-0123", "cmpl-es-" + "g" * 20])
def test_other_ids_are_somebody_elses(engine_id: str) -> None:
    assert request_token(engine_id) is None


def test_a_full_snapshot_is_the_state() -> None:
    feed = fed(snapshot("full", 4, running(part(9), 1000)), FULL)
    assert (feed.load_tokens, feed.running, feed.waiting, feed.slots) == (165, 2, 2, 8)
    assert feed.running_by_token == {token(1): 1}
    assert (feed.epoch, feed.sequence, feed.step, feed.received_s) == ("e1", 5, 5, 1.0)
    assert (feed.gaps, feed.full_wanted) == (0, False)


def test_in_a_delta_whoever_is_not_listed_grew_by_one() -> None:
    feed = fed(FULL, snapshot("delta", 6), snapshot("delta", 7, running(part(1), 100, 15)))
    assert feed.load_tokens == (100 + 15) + (50 + 5 + 2)
    assert feed.generated_by_token(token(1)) == 15
    assert feed.generated_by_token(token(2)) == 0


def test_parts_of_one_request_are_counted_each() -> None:
    feed = fed(FULL, snapshot("delta", 6, running(part(2, 0), 10, 3), running(part(2, 1), 10, 4)))
    assert feed.running_by_token == {token(1): 1, token(2): 2}
    assert feed.generated_by_token(token(2)) == 7
    feed.apply(snapshot("delta", 7, finished=(part(2, 0),)), 0)
    assert feed.running_by_token == {token(1): 1, token(2): 1}


@pytest.mark.parametrize("how", ["finished", "preempted"])
def test_who_leaves_counted_in_its_last_step(how: str) -> None:
    feed = fed(FULL)
    gone = (part(1), "unheard of")
    last = (
        snapshot("delta", 6, finished=gone)
        if how == "finished"
        else snapshot("delta", 6, preempted=gone)
    )
    assert feed.apply(last, 1.0) == ([token(1)] if how == "finished" else [])
    assert (feed.step_load_tokens, feed.load_tokens, feed.running) == (167, 56, 1)
    assert feed.running_by_token == {}


def test_a_request_may_come_and_go_in_one_step() -> None:
    feed = fed(FULL, snapshot("delta", 6, running(part(3), 30, 1), finished=(part(3),)))
    assert (feed.step_load_tokens, feed.load_tokens) == (167 + 31, 167)


def test_a_prompt_in_prefill_is_load_but_not_yet_resident() -> None:
    feed = fed(FULL, snapshot("delta", 6, running(part(2), 400, prefill_left=300)))
    assert (feed.load_tokens, feed.step_load_tokens, feed.resident_tokens) == (567, 267, 267)
    feed.apply(snapshot("delta", 7, running(part(2), 400, 1)), 0)
    assert feed.load_tokens == feed.step_load_tokens == 169 + 401


@pytest.mark.parametrize(
    ("late", "taken"),
    [
        (snapshot("delta", 6), False),
        (snapshot("delta", 7), False),
        (snapshot("full", 6), False),
        (snapshot("full", 7), True),
        (snapshot("delta", 8), True),
    ],
)
def test_late_and_repeated_snapshots_change_nothing(late: Snapshot, taken: bool) -> None:
    feed = fed(FULL, snapshot("delta", 6), snapshot("delta", 7))
    before = (feed.load_tokens, feed.sequence, feed.received_s)
    assert (feed.apply(late, 9.0) is not None) is taken
    assert ((feed.load_tokens, feed.sequence, feed.received_s) == before) is not taken


def test_a_gap_is_counted_once_and_asks_for_a_full_snapshot() -> None:
    feed = fed(FULL, snapshot("delta", 9))
    assert (feed.gaps, feed.full_wanted) == (3, True)
    feed.apply(snapshot("delta", 12), 0)
    assert feed.gaps == 3, "while a full one is wanted nothing is known of what came between"
    feed.apply(snapshot("full", 12), 0)
    assert (feed.gaps, feed.full_wanted, feed.load_tokens) == (3, False, 0)
    feed.apply(snapshot("delta", 13), 0)
    assert (feed.gaps, feed.full_wanted) == (3, False)


def test_a_stream_joined_in_its_midst_wants_a_full_snapshot_and_has_no_gap() -> None:
    feed = fed(snapshot("delta", 500, running(part(1), 100, 3)))
    assert (feed.load_tokens, feed.full_wanted, feed.gaps) == (103, True, 0)


def test_a_new_epoch_forgets_the_old_engine() -> None:
    feed = fed(FULL, snapshot("delta", 0, running(part(2), 7), epoch="e2"))
    assert (feed.load_tokens, feed.running_by_token) == (7, {token(2): 1})
    assert (feed.epoch, feed.sequence, feed.full_wanted, feed.gaps) == ("e2", 0, True, 0)


def test_a_request_whose_answer_is_complete_is_gone_whatever_late_snapshots_say() -> None:
    feed = fed(FULL)
    feed.forget(token(1))
    assert (feed.load_tokens, feed.running_by_token) == (55, {})
    feed.apply(snapshot("full", 5, *FULL.running), 0)
    feed.apply(snapshot("delta", 6, running(part(1), 100, 11)), 0)
    assert (feed.load_tokens, feed.running) == (56, 1)
    assert feed.apply(snapshot("delta", 7, finished=(part(1),)), 0) == [token(1)]


def test_only_the_latest_thousands_are_remembered_as_complete() -> None:
    feed = fed(FULL)
    for number in range(1, 4098):
        feed.forget(token(number))
    feed.apply(snapshot("full", 6, running(part(1)), running(part(2)), running(part(4097))), 0)
    assert feed.running_by_token == {token(1): 1}


def test_somebody_elses_request_ends_without_a_token() -> None:
    feed = fed(FULL)
    assert feed.apply(snapshot("delta", 6, finished=("theirs",)), 0) == []
    assert (feed.load_tokens, feed.running_by_token) == (111, {token(1): 1})


def test_an_end_that_is_told_twice_is_one() -> None:
    feed = fed(FULL)
    assert feed.apply(snapshot("delta", 6, finished=(part(1), part(1))), 1.0) == [token(1)]


def test_what_a_fault_leaves_half_taken_in_asks_for_a_full_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    feed = fed(FULL)
    with monkeypatch.context() as broken:
        broken.setattr(Feed, "_tell", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            feed.apply(snapshot("delta", 6), 1.0)
    assert feed.full_wanted
    feed.apply(snapshot("full", 7, running(part(1), 100, 12)), 2.0)
    assert not feed.full_wanted


def test_requests_that_are_asked_about_say_what_they_hold_in_each_step() -> None:
    asked = {token(1)}
    feed = Feed(asked=asked)
    parts = running(part(1), 100, 10), running(part(1, 1), 100, 1, 40), running(part(2), 50, 5)
    feed.apply(snapshot("full", 5, *parts), 0.0)
    assert feed.step_asked == {token(1): 110 + 61}
    feed.apply(snapshot("delta", 6, finished=(part(1), part(1, 1))), 0.0)
    assert feed.step_asked == {token(1): 111 + 62}, "those that end in it are still in it"
    asked.clear()
    feed.apply(snapshot("delta", 7), 0.0)
    assert feed.step_asked == {}
