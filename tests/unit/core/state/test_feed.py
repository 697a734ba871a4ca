"""One engine's state from its snapshots, message by message."""

import msgspec
import pytest

from router.core.state.feed import Feed
from router.core.state.running_table import RunningTable
from router.core.step_time import Work
from router.core.types import FREE_PLACE, RunningRequest, Snapshot
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
    assert (feed.epoch, feed.sequence, feed.last.step, feed.received_s) == ("e1", 5, 5, 1.0)
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


def test_requests_of_an_engine_that_is_gone_leave_in_the_order_in_which_they_came() -> None:
    """So that what is learned from them is the same at every start."""
    feed = fed(snapshot("full", 1, *(running(part(number), 10) for number in range(1, 40))))
    feed.clear()
    left = [departure.id for _, departure in feed.departures]
    assert left == sorted(left)


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
    assert feed.step_asked == {token(1): Work(110 + 61, 2)}
    feed.apply(snapshot("delta", 6, finished=(part(1), part(1, 1))), 0.0)
    work = {token(1): Work(111 + 62, 2)}
    assert feed.step_asked == work, "those that end in it are still in it"
    asked.clear()
    feed.apply(snapshot("delta", 7), 0.0)
    assert feed.step_asked == {}


def test_prompts_are_work_of_the_steps_that_compute_them() -> None:
    feed = Feed(asked={token(1)})
    feed.apply(snapshot("full", 5), 0.0)
    first = running(part(1), 100, 0, 60), running(part(2), 30, 1)
    feed.apply(computing(6, 70, *first), 0.0)
    assert feed.step_asked == {token(1): Work(40, 1, 40)}
    assert feed.step_prompt_context == 40 * 20 + 30 * 15
    feed.apply(computing(7, 60, running(part(1), 100, 1)), 0.0)
    assert feed.step_asked == {token(1): Work(101, 1, 60)}
    assert feed.step_prompt_context == 60 * (40 + 30)
    feed.apply(snapshot("delta", 8), 0.0)
    assert feed.step_asked == {token(1): Work(102, 1)}
    assert feed.step_prompt_context == 0


def computing(sequence: int, prompt_tokens: int, *parts: RunningRequest) -> Snapshot:
    told = snapshot("delta", sequence, *parts)
    return msgspec.structs.replace(told, scheduled_prefill_tokens=prompt_tokens)


def test_prompts_of_requests_met_in_the_midst_are_no_work_of_that_step() -> None:
    """A full snapshot, and those after a gap, do not tell when prompts were computed."""
    feed = Feed(asked={token(1)})
    old, begun = running(part(2), 2000, 100), running(part(1), 500, 0, 440)
    first = msgspec.structs.replace(snapshot("full", 5, old, begun), scheduled_prefill_tokens=60)
    feed.apply(first, 0.0)
    assert (feed.step_prompt_context, feed.step_asked) == (0, {token(1): Work(60, 1)})
    feed.apply(computing(6, 40, running(part(1), 500, 0, 400)), 0.0)
    assert (feed.step_prompt_context, feed.step_asked) == (40 * 80, {token(1): Work(100, 1, 40)})
    feed.apply(computing(9, 10, running(part(1), 500, 0, 200)), 0.0)
    assert (feed.step_prompt_context, feed.step_asked) == (0, {token(1): Work(300, 1)})


def test_a_prompt_that_came_computed_is_no_work() -> None:
    feed = Feed(asked={token(1)})
    feed.apply(snapshot("full", 5), 0.0)
    feed.apply(snapshot("delta", 6, running(part(1), 100, 1)), 0.0)
    assert feed.step_asked == {token(1): Work(101, 1)}
    assert feed.step_prompt_context == 0


def placed(
    engine_id: str, place: int, prompt: int = 100, generated: int = 0, left: int = 0
) -> RunningRequest:
    return RunningRequest(engine_id, prompt, generated, 0, left, place=place)


def growth(sequence: int, growths: bytes, *told: RunningRequest, **fields: object) -> Snapshot:
    delta = snapshot("delta", sequence, *told, **fields)  # type: ignore[arg-type]
    return msgspec.structs.replace(delta, kind="growth", growths=growths)


PLACED = snapshot("full", 5, placed(part(1), 3, 100, 10), placed("theirs", 0, 50, 5), slots=8)
FREE = bytes([FREE_PLACE])


def test_a_growth_tells_by_place_what_each_request_gained() -> None:
    rows = RunningTable().worker()
    feed = Feed(rows)
    feed.apply(PLACED, 0.0)
    entering = placed(part(2), 1, 30, 1)
    feed.apply(growth(6, b"\2" + FREE * 2 + b"\4", entering), 0.0)
    assert feed.load_tokens == feed.step_load_tokens == (50 + 7) + (100 + 14) + 31
    assert (feed.step_grown, feed.step_decoding, feed.full_wanted) == (6, 2, False)
    feed.apply(snapshot("delta", 7), 0.0)
    assert (feed.step_grown, feed.step_decoding) == (3, 3)
    feed.apply(growth(8, b"\1\0" + FREE + b"\3", finished=(part(1),)), 0.0)
    assert (feed.step_load_tokens, feed.load_tokens) == (59 + 32 + 118, 59 + 32)
    assert feed.departures[-1][1].generated_tokens == 18
    assert feed.generated_by_token(token(2)) == 2
    feed.apply(growth(9, b"\2\2"), 0.0)
    assert not feed.full_wanted
    table = rows._table.running([0])
    assert sorted(table.generated_tokens.tolist()) == [4, 11]


@pytest.mark.parametrize(
    "growths",
    [
        pytest.param(b"\2\2" + FREE + b"\4", id="a place that nobody has"),
        pytest.param(b"\2", id="a place is missing"),
        pytest.param(b"\2" + FREE * 3, id="a place is free"),
        pytest.param(b"\2" + FREE * 2 + b"\4" + b"\1" * 100, id="places beyond all that are known"),
    ],
)
def test_growths_of_other_places_than_are_known_ask_for_a_full_snapshot(growths: bytes) -> None:
    feed = fed(PLACED, growth(6, growths))
    assert feed.full_wanted
    feed.apply(msgspec.structs.replace(PLACED, sequence=6), 0.0)
    assert (feed.full_wanted, feed.load_tokens) == (False, 165)


def test_a_place_that_another_one_still_has_asks_for_a_full_snapshot() -> None:
    feed = fed(PLACED, snapshot("delta", 6, placed(part(2), 3, 30, 1)))
    assert (feed.full_wanted, feed.load_tokens) == (True, 56 + 31)
    (departed,) = feed.departures
    assert (departed[0], departed[1].completed) == (token(1), False)
    feed.apply(snapshot("full", 6, placed("theirs", 3, 50, 6), placed(part(2), 0, 30, 1)), 0.0)
    assert (feed.full_wanted, feed.load_tokens) == (False, 87)
    assert len(feed.departures) == 1, "in a full one they may have other places"


def test_a_request_whose_answer_is_complete_keeps_its_place_until_the_engine_drops_it() -> None:
    feed = fed(PLACED)
    feed.forget(token(1))
    feed.apply(growth(6, b"\2" + FREE * 2 + b"\4"), 0.0)
    assert (feed.load_tokens, feed.full_wanted, feed.step_grown) == (57, False, 2)
    late = placed(part(1), 3, 100, 19)
    feed.apply(growth(7, b"\2" + FREE * 2 + b"\1", late), 0.0)
    feed.apply(snapshot("full", 7, placed("theirs", 0, 50, 9), late), 0.0)
    assert (feed.load_tokens, feed.full_wanted) == (59, False)
    feed.apply(growth(8, b"\2" + FREE * 2 + b"\4", finished=(part(1),)), 0.0)
    feed.apply(growth(9, b"\2"), 0.0)
    assert (feed.load_tokens, feed.full_wanted, feed.running) == (63, False, 1)
    feed.forget(token(2))
    feed.apply(snapshot("delta", 10, placed(part(2), 1, 7, 1)), 0.0)
    feed.apply(snapshot("delta", 11, placed(part(3), 1, 7, 1)), 0.0)
    assert (feed.load_tokens, feed.full_wanted) == (65 + 8, True), "its place is another's"


def test_growth_counts_requests_in_decode_only() -> None:
    feed = fed(PLACED, snapshot("delta", 6, placed(part(2), 1, 400, 0, 300)))
    assert (feed.step_grown, feed.step_decoding) == (2, 2)
    chunk = placed(part(2), 1, 400, 0, 100)
    feed.apply(growth(7, b"\3\1" + FREE + b"\3", chunk), 0.0)
    assert (feed.step_grown, feed.step_decoding) == (6, 2)
    assert feed.step_firsts == 0
    feed.apply(snapshot("delta", 8, placed(part(2), 1, 400, 1)), 0.0)
    assert (feed.step_grown, feed.step_decoding, feed.step_firsts) == (2, 2, 1)
    listed = placed(part(2), 1, 400, 4), placed("theirs", 0, 50, 13)
    feed.apply(snapshot("delta", 9, *listed), 0.0)
    assert (feed.step_grown, feed.step_decoding) == (3 + 3 + 1, 3), "as older plug-ins tell it"
    assert feed.step_firsts == 0
    feed.apply(snapshot("full", 12, *listed), 0.0)
    assert (feed.step_grown, feed.step_decoding) == (0, 0)
    feed.apply(snapshot("delta", 14), 0.0)
    assert (feed.step_grown, feed.step_decoding) == (0, 0), "after a gap nothing is known"
