"""WAIT and Nested WAIT as printed: who pauses, and what it costs."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine_patches.admission import make_admission, read_admission
from engine_patches.admission.ledger import Ledger, Memory, Ticket
from engine_patches.admission.policies.strict import LONGEST_PAUSE_S, StrictNestedWait, StrictWait
from engine_patches.admission.protocol import Admission, Verdict, ledger_of
from engine_patches.admission.settings import AdmissionError, AdmissionSettings
from loadgen.simulator.admission.admission_simulation import AdmissionConfig, simulate_admission
from loadgen.simulator.admission.scenarios import scenario_of

ROOM = Memory(10_000, 0, 100)


def wait(ledger: Ledger, count: int, kind: int = 0, prompt: int = 5) -> None:
    for _ in range(count):
        number = sum(ledger.arrivals.values())
        ledger.arrived(Ticket(f"{kind}.{number}", prompt, 100, kind=kind))


def run(ledger: Ledger, stages: Sequence[int], kind: int = 0) -> None:
    """Requests that run, one in each of the stages."""
    for stage in stages:
        number = sum(ledger.arrivals.values())
        id_ = f"{kind}.{number}@{stage}"
        ledger.arrived(Ticket(id_, 5, 100, kind=kind, priority=-1, generated_tokens=stage))
        ledger.entered(id_)


def going(verdict: Verdict) -> list[str]:
    """Stages of those that go on, and e for each that enters."""
    assert verdict.run is not None
    assert verdict.admit is not None
    return sorted(id_.partition("@")[2] for id_ in verdict.run) + ["e"] * len(verdict.admit)


def test_a_type_moves_once_enough_of_it_wait() -> None:
    policy = StrictWait([2, 3])
    ledger = ledger_of(policy)
    run(ledger, [1, 1, 1, 2])
    run(ledger, [7], kind=1)
    wait(ledger, 1)
    wait(ledger, 4, kind=1)

    second = policy.admit(ledger, ROOM, 0.0)
    assert going(second) == ["7", "e", "e", "e"]
    assert second.wake_s == LONGEST_PAUSE_S

    wait(ledger, 1)
    assert going(policy.admit(ledger, ROOM, 1.0)) == ["1", "1", "2", "7"] + ["e"] * 5


def test_the_last_threshold_is_for_all_types_from_there_on() -> None:
    policy = StrictWait([2, 3])

    assert [policy.threshold(kind) for kind in range(4)] == [2, 3, 3, 3]


def test_entries_end_where_memory_or_slots_do() -> None:
    policy = StrictWait([3])
    ledger = ledger_of(policy)
    wait(ledger, 3, prompt=40)

    assert going(policy.admit(ledger, Memory(100, 0, 9), 0.0)) == ["e", "e"]
    assert going(policy.admit(ledger, Memory(1000, 0, 1), 0.0)) == ["e"]
    assert policy.admissible_blocks(ledger, Memory(100, 30, 9)) == 70


def test_what_stands_still_for_too_long_goes_on_until_an_arrival() -> None:
    policy = StrictWait([2])
    ledger = ledger_of(policy)
    run(ledger, [3])

    verdict = policy.admit(ledger, ROOM, 5.0)
    assert going(verdict) == []
    assert verdict.wake_s == 5.0 + LONGEST_PAUSE_S
    for now_s in (35.0, 35.1):
        verdict = policy.admit(ledger, ROOM, now_s)
        assert going(verdict) == ["3"]
        assert verdict.wake_s is None
    wait(ledger, 1)
    assert going(policy.admit(ledger, ROOM, 35.2)) == []


def test_an_empty_engine_has_nothing_to_wake_for() -> None:
    for policy in (StrictWait([2]), StrictNestedWait([2, 1], [4])):
        ledger = ledger_of(policy)

        assert policy.admit(ledger, ROOM, 0.0).wake_s is None


def iterate(policy: Admission, start: tuple[int, int], iterations: int) -> list[int]:
    """Example 2: completions of each iteration; four arrive in one, after an uneven start."""
    ledger, capacity, ended = ledger_of(policy), 12, []
    run(ledger, [1] * start[0])
    wait(ledger, start[1], prompt=1)
    for ticket in ledger.running.values():
        ticket.prompt_tokens, ticket.offset_tokens = 1, 2 - ledger.steps
    for step in range(iterations):
        used = sum(ledger.size_tokens(ticket) for ticket in ledger.running.values())
        verdict = policy.admit(ledger, Memory(capacity, used, 100), float(step))
        assert verdict.admit is not None
        for ticket in verdict.admit:
            ledger.entered(ticket.id)
        still = deque(ledger.running)
        if verdict.run is not None:
            still = deque(set(ledger.running) - verdict.run - {t.id for t in verdict.admit})
        else:
            still.clear()
        ledger.stepped(still)
        over = [t for t in ledger.running.values() if ledger.generated_tokens(t) == 2]
        for ticket in over:
            ledger.left(ticket.id)
        ended.append(len(over))
        wait(ledger, 4, prompt=1)
    return ended


def test_example_2_completes_four_in_an_iteration() -> None:
    ended = iterate(StrictWait([4]), (3, 6), 50)

    assert ended[0] == 3
    assert set(ended[1:]) == {4}


SEGMENTS = (3, 6)


@pytest.mark.parametrize(
    ("waiting", "stages", "expected"),
    [
        pytest.param(2, [0, 1, 3, 3], [], id="too few wait: all pause"),
        pytest.param(3, [0, 1, 3, 6], ["0", "1", "e", "e", "e"], id="the first segment alone"),
        pytest.param(3, [1, 3, 3, 4, 7], ["1", "3", "3", "4", "e", "e", "e"], id="two segments"),
        pytest.param(3, [3, 3, 3, 6, 6, 9], ["3", "3", "6", "9", "e", "e", "e"], id="all segments"),
        pytest.param(9, [2, 5], ["2", "e", "e", "e"], id="three of many"),
        pytest.param(0, [3, 3, 6], [], id="later segments wait for the first"),
    ],
)
def test_a_segment_moves_if_all_before_it_do(
    waiting: int, stages: list[int], expected: list[str]
) -> None:
    policy = StrictNestedWait([3, 2, 1], SEGMENTS)
    ledger = ledger_of(policy)
    run(ledger, stages)
    wait(ledger, waiting)

    assert going(policy.admit(ledger, ROOM, 0.0)) == expected


def test_of_nested_wait_all_segments_go_on_after_too_long() -> None:
    policy = StrictNestedWait([3, 2, 1], SEGMENTS)
    ledger = ledger_of(policy)
    run(ledger, [1, 4, 7])
    assert going(policy.admit(ledger, ROOM, 0.0)) == []

    assert going(policy.admit(ledger, ROOM, LONGEST_PAUSE_S)) == ["1", "4", "7"]
    assert policy.admissible_blocks(ledger, Memory(100, 30, 9)) == 70


def test_thresholds_and_segments_belong_together() -> None:
    with pytest.raises(AssertionError, match="one threshold for each segment"):
        StrictNestedWait([3, 2], SEGMENTS)


@pytest.mark.parametrize(
    ("policy", "thresholds", "segments"),
    [("wait", [1], []), ("nested_wait", [1] * 10, list(range(51, 452, 50)))],
)
def test_pauses_make_requests_many_times_slower(
    policy: str, thresholds: list[int], segments: list[int]
) -> None:
    """At 3 % of the memory; no request evicted, none missing."""
    scenario = replace(scenario_of("vidur8b_lmsys10"), rate=55, requests=300)
    given = {"policy": policy, "thresholds": thresholds, "segments": segments}
    plain, strict = (
        AdmissionConfig(read_admission(given | {"strict": strict}), scenario)
        for strict in (False, True)
    )

    with pytest.warns(UserWarning, match="many times slower"):
        paused = simulate_admission(strict)

    live = simulate_admission(plain)
    assert paused.completed == live.completed == 300
    assert paused.evictions_per_1k == live.evictions_per_1k == 0
    assert paused.latency_mean_s > 3 * live.latency_mean_s


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"policy": "wait"}, "strict wait needs thresholds; evenstep fluid finds valid"),
        ({"policy": "nested_wait"}, "strict nested_wait needs thresholds"),
        ({"policy": "nested_wait", "thresholds": [2]}, "strict nested_wait needs segments"),
    ],
)
def test_without_thresholds_it_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(AdmissionError, match=message):
        read_admission(given | {"strict": True})


def test_types_are_told_apart_by_segments() -> None:
    settings = AdmissionSettings(policy="wait", thresholds=(2, 3), segments=(9,), strict=True)

    with pytest.warns(UserWarning, match="strict: "):
        policy = make_admission(settings)

    ledger = ledger_of(policy)
    ledger.arrived(Ticket("a", 5, 100, hint_tokens=20))
    assert ledger.waiting_kinds == {1: 1}
