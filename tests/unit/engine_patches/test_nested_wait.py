"""Nested WAIT without pauses: what it expects, whom it lets in."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from engine_patches.admission.ledger import Ledger, Memory, Ticket
from engine_patches.admission.policies.nested_wait import NestedWait
from engine_patches.admission.protocol import Verdict, ledger_of
from engine_patches.admission.settings import AdmissionSettings
from engine_patches.admission.theory.outlook import Outlook
from engine_patches.admission.theory.passing import SEGMENTS, Passing
from engine_patches.admission.theory.thresholds import decay_rate
from loadgen.simulator.admission.admission_simulation import AdmissionConfig, simulate_admission
from loadgen.simulator.admission.scenarios import scenario_of

CAP = 1000
CAPACITY = 10_000
DELTA = 0.1


def running(ledger: Ledger, count: int, prompt: int, generated: int = 0) -> None:
    for _ in range(count):
        id_ = f"r{ledger.entered_total}"
        ledger.arrived(Ticket(id_, prompt, CAP, generated_tokens=generated, priority=-1))
        ledger.entered(id_)


def waiting(ledger: Ledger, prompts: Sequence[int], generated: int = 0) -> None:
    for prompt in prompts:
        id_ = f"w{sum(ledger.arrivals.values())}"
        ledger.arrived(Ticket(id_, prompt, CAP, generated_tokens=generated))


def used(ledger: Ledger) -> int:
    return sum(ledger.size_tokens(ticket) for ticket in ledger.running.values())


def memory(ledger: Ledger, capacity: int, slots: int = 64) -> Memory:
    return Memory(capacity, used(ledger), slots)


def let_in(verdict: Verdict) -> int:
    assert verdict.admit is not None
    assert verdict.run is None
    return len(verdict.admit)


def outlook_of(ledger: Ledger, passing: Passing, capacity: int = CAPACITY) -> Outlook:
    return Outlook(passing, ledger, memory(ledger, capacity), DELTA, Ticket("head", 10, CAP))


def needs(outlook: Outlook) -> dict[int, float]:
    """By steps from now; no more than if all stay."""
    free = np.maximum(outlook._free, outlook._sure)
    return {int(step): CAPACITY - left for step, left in zip(outlook._steps, free, strict=True)}


def test_now_what_runs_needs_what_it_holds() -> None:
    ledger = Ledger()
    running(ledger, 10, 30)

    assert needs(outlook_of(ledger, Passing((16, 64), [0.5, 0.2])))[0] == pytest.approx(300)


def test_the_level_and_its_buffer_solve_20() -> None:
    """For equal requests it is the paper's equation, with requests for units."""
    ledger, passing = Ledger(), Passing((16, 64), [0.5, 0.2])
    running(ledger, 10, 30)

    outlook = outlook_of(ledger, passing)

    place = list(outlook._steps).index(16)
    theta = float(outlook._theta[place])
    level = needs(outlook)[16] - math.log(1 / DELTA) / theta
    assert decay_rate(10, level / 46, 0.5) == pytest.approx(theta * 46)


@pytest.mark.parametrize("generated", [0, 20])
def test_memory_exceeds_what_is_expected_as_rarely_as_asked(generated: int) -> None:
    rng = np.random.default_rng(5)
    ledger, passing = Ledger(), Passing((16, 64, 256), [0.6, 0.5, 0.3])
    running(ledger, 12, 20, generated)
    running(ledger, 4, 90, generated)
    prompts = np.array([ticket.prompt_tokens for ticket in ledger.running.values()])

    needed = needs(outlook_of(ledger, passing))

    log_alive = passing.log_alive(np.zeros(3))
    fall = log_alive(np.array([float(generated)])) + np.log(rng.random((4000, 16)))
    ends = np.array([0.0, *passing.segments, 1e7])
    lengths = np.interp(-fall, -log_alive(ends), ends)
    for step, most in needed.items():
        stay = lengths > generated + step
        if math.isfinite(most):
            held = (stay * (prompts + generated + step)).sum(axis=1)
            assert (held > most + 1e-6).mean() <= DELTA
        else:
            assert stay.any(axis=1).mean() <= DELTA


def test_room_is_what_can_be_taken() -> None:
    ledger, passing = Ledger(), Passing((16, 64), [0.5, 0.2])
    running(ledger, 100, 60)
    outlook = outlook_of(ledger, passing)
    room = outlook.room

    assert room > 100
    outlook.take(Ticket("a", room, CAP), room)
    assert float(outlook._free.min()) >= 0
    assert outlook.room < 50
    outlook.take(Ticket("b", 50, CAP), 50)
    assert outlook.room == outlook.room_at(20) == 0


def test_who_came_far_is_expected_to_grow_on() -> None:
    ledger, passing = Ledger(), Passing((16, 64), [0.3, 0.95])
    running(ledger, 100, 60, generated=40)
    outlook = outlook_of(ledger, passing, 45_000)

    assert 0 < outlook.room_at(16) < outlook.room
    before = outlook._free.copy()
    outlook.take(Ticket("a", 10, CAP, generated_tokens=16), 26)
    assert (before - outlook._free)[:5] == pytest.approx(26 + outlook._steps[:5], rel=0.05)


def test_a_few_need_no_more_than_if_all_stay() -> None:
    ledger, passing = Ledger(), Passing((16, 64), [0.999, 0.999])
    running(ledger, 2, 60)
    outlook = outlook_of(ledger, passing, 3 * 600)

    assert outlook.room == 3 * 600 - 2 * (60 + 512) - 512
    outlook.take(Ticket("a", 10, CAP), 10)
    assert outlook.room == 0


def test_nobody_is_expected_beyond_the_cap() -> None:
    ledger, passing = Ledger(), Passing((16,), [1.0])

    outlook = Outlook(passing, ledger, memory(ledger, 49), DELTA, Ticket("head", 10, 40))

    assert list(outlook._steps) == [0, 1, 2, 4, 8, 16, 32]
    assert outlook.room == 49 - 32


def test_who_reaches_its_cap_is_gone() -> None:
    ledger, passing = Ledger(), Passing((16,), [1.0])
    ledger.arrived(Ticket("r", 10, 40, generated_tokens=30))
    ledger.entered("r")

    outlook = Outlook(passing, ledger, memory(ledger, 100), DELTA, Ticket("head", 10, 40))

    # In 8 steps it has 48 tokens and the other has grown by 8; in 16 it is gone.
    assert outlook.room == 100 - 48 - 8


def test_what_others_hold_is_no_room() -> None:
    ledger, passing = Ledger(), Passing((16, 64), [0.5, 0.2])
    running(ledger, 100, 60)
    head = Ticket("head", 10, CAP)

    rooms = [
        Outlook(passing, ledger, Memory(CAPACITY, used(ledger) + more, 64), DELTA, head).room
        for more in (0, 500)
    ]

    assert rooms[1] == rooms[0] - 500


def test_an_empty_engine_takes_its_first() -> None:
    policy = NestedWait(Passing(SEGMENTS), entries=3)
    ledger = ledger_of(policy)
    waiting(ledger, [95, 95])

    assert let_in(policy.admit(ledger, memory(ledger, 100), 0.0)) == 1
    assert policy.admissible_blocks(ledger, memory(ledger, 100)) == 100


def test_an_empty_engine_takes_its_first_though_it_will_outgrow_the_memory() -> None:
    policy = NestedWait(Passing((64,), [0.99]), entries=3)
    ledger = ledger_of(policy)
    waiting(ledger, [98, 1])

    assert let_in(policy.admit(ledger, memory(ledger, 100), 0.0)) == 1


def test_with_an_outlook_of_some_steps_ago_no_more_enter_than_fit_now() -> None:
    policy = NestedWait(Passing((2, 64), [0.01, 0.01]), entries=2)
    ledger = ledger_of(policy)
    running(ledger, 20, 20)
    waiting(ledger, [200])
    assert let_in(policy.admit(ledger, memory(ledger, 500), 0.0)) == 0
    for _ in range(3):
        ledger.stepped()
    ledger.left("w20", by_itself=False)
    waiting(ledger, [30, 30])

    assert let_in(policy.admit(ledger, memory(ledger, 500), 0.1)) == 1


def test_what_never_fits_holds_all_back() -> None:
    policy = NestedWait(Passing(SEGMENTS), entries=3)
    ledger = ledger_of(policy)
    waiting(ledger, [200, 1])

    assert let_in(policy.admit(ledger, memory(ledger, 100), 0.0)) == 0


def test_no_more_enter_than_the_first_threshold() -> None:
    policy = NestedWait(Passing(SEGMENTS), entries=3)
    ledger = ledger_of(policy)
    waiting(ledger, [5] * 9)

    assert let_in(policy.admit(ledger, memory(ledger, 100_000), 0.0)) == 3
    assert let_in(policy.admit(ledger, memory(ledger, 100_000, slots=2), 0.0)) == 2
    assert let_in(policy.admit(ledger, memory(ledger, 100_000, slots=0), 0.0)) == 0


def test_the_first_threshold_is_above_a_steps_arrivals() -> None:
    policy = NestedWait(Passing(SEGMENTS))
    ledger = ledger_of(policy)
    running(ledger, 1, 5)
    now_s = 0.0
    for _ in range(200):
        waiting(ledger, [5] * 5)
        policy.admit(ledger, memory(ledger, 10**9, slots=0), now_s)
        ledger.stepped()
        now_s += 0.1

    assert policy.threshold(ledger) == pytest.approx(5.5, abs=1)


def test_what_has_piled_up_drains_as_fast_as_requests_end() -> None:
    policy = NestedWait(Passing(SEGMENTS))
    ledger = ledger_of(policy)
    waiting(ledger, [5] * 4000)
    for step in range(600):
        let_in(policy.admit(ledger, memory(ledger, 10**9), step / 10))
        for ticket in list(ledger.waiting[:5]):
            ledger.entered(ticket.id)
        ledger.stepped()
        for id_ in list(ledger.running)[:-1]:
            ledger.left(id_)

    assert policy.threshold(ledger) == pytest.approx(5.5, abs=1)


def test_growth_is_kept_room_for() -> None:
    """That they fit now is not enough, unless they will soon have ended."""
    for share, enters in ((0.9, 0), (0.01, 1)):
        policy = NestedWait(Passing((2, 64), [share, share]), entries=1)
        ledger = ledger_of(policy)
        running(ledger, 20, 20)
        waiting(ledger, [20])
        assert let_in(policy.admit(ledger, memory(ledger, 500), 0.0)) == enters


def test_who_lost_its_slot_returns_with_what_it_had() -> None:
    policy = NestedWait(Passing((2, 64), [0.5, 0.1]), entries=1)
    ledger = ledger_of(policy)
    running(ledger, 20, 20)
    waiting(ledger, [20], generated=30)

    assert let_in(policy.admit(ledger, memory(ledger, 2000), 0.0)) == 1
    assert let_in(policy.admit(ledger, memory(ledger, 449), 0.0)) == 0


@pytest.mark.parametrize(("generated", "enters"), [(0, 1), (16, 0)])
def test_who_returns_is_expected_to_go_as_far_as_others_that_came_so_far(
    generated: int, enters: int
) -> None:
    passing = Passing((16, 64), [0.3, 0.95])
    policy = NestedWait(passing, entries=1)
    ledger = ledger_of(policy)
    running(ledger, 100, 60, generated=40)
    outlook = outlook_of(ledger, passing, 45_000)
    tokens = (outlook.room + outlook.room_at(16)) // 2
    waiting(ledger, [tokens - generated], generated)

    assert let_in(policy.admit(ledger, memory(ledger, 45_000), 0.0)) == enters


def test_an_outlook_serves_until_many_have_left_or_it_is_old() -> None:
    policy = NestedWait(Passing((2, 64), [0.9, 0.5]), entries=1)
    ledger = ledger_of(policy)
    running(ledger, 16, 40)
    waiting(ledger, [10])
    assert policy.admissible_blocks(ledger, memory(ledger, 1000)) == 360
    assert let_in(policy.admit(ledger, memory(ledger, 1000), 0.0)) == 0
    assert policy.admissible_blocks(ledger, memory(ledger, 1000)) == 0

    for number in range(2):
        ledger.left(f"r{number}")
    policy.admit(ledger, memory(ledger, 1000), 0.0)
    made = policy._last
    for number in range(2, 12):
        ledger.left(f"r{number}")
    assert let_in(policy.admit(ledger, memory(ledger, 1000), 0.0)) == 1
    assert policy._last is not made

    renewed = policy._last
    for _ in range(8):
        ledger.stepped()
    policy.admit(ledger, memory(ledger, 1000), 0.0)
    assert policy._last is not renewed


def test_while_nobody_waits_what_it_would_let_in_grows_as_others_leave() -> None:
    policy = NestedWait(Passing((2, 64), [0.9, 0.5]), entries=1)
    ledger = ledger_of(policy)
    running(ledger, 16, 40)
    waiting(ledger, [10])
    policy.admit(ledger, memory(ledger, 1000), 0.0)
    ledger.left("w16", by_itself=False)
    rooms = []
    for number in range(15):
        rooms.append(policy.admissible_blocks(ledger, memory(ledger, 1000)))
        ledger.left(f"r{number}")

    assert rooms[0] == 0
    assert rooms == sorted(rooms)
    assert rooms[-1] > 500


def test_who_could_not_enter_after_all_is_expected_once() -> None:
    policy = NestedWait(Passing((16, 64), [0.5, 0.2]), entries=2)
    ledger = ledger_of(policy)
    running(ledger, 10, 60)
    waiting(ledger, [200, 200])
    rooms = []
    for step in range(6):
        assert let_in(policy.admit(ledger, memory(ledger, 3000), step / 10)) == 2 - (step > 3)
        rooms.append(policy.admissible_blocks(ledger, memory(ledger, 3000)))
        if step == 3:
            ledger.entered("w10")

    assert rooms == [rooms[0]] * 6


def test_who_was_withdrawn_before_it_entered_is_expected_no_more() -> None:
    policy = NestedWait(Passing((16, 64), [0.5, 0.2]), entries=1)
    ledger = ledger_of(policy)
    running(ledger, 10, 60)
    rooms = []
    for _ in range(3):
        waiting(ledger, [200])
        assert let_in(policy.admit(ledger, memory(ledger, 3000), 0.0)) == 1
        rooms.append(policy.admissible_blocks(ledger, memory(ledger, 3000)))
        ledger.left(f"w{sum(ledger.arrivals.values()) - 1}", by_itself=False)

    assert rooms == [rooms[0]] * 3


def test_under_pressure_hardly_anybody_is_evicted() -> None:
    """A chat model with little memory; lengths are unknown."""
    chat = replace(scenario_of("chat70b"), rate=11, requests=2000)
    off, nested = (
        simulate_admission(AdmissionConfig(AdmissionSettings(policy=policy), chat))
        for policy in ("off", "nested_wait")
    )

    assert off.evictions_per_1k > 100
    assert nested.evictions_per_1k < off.evictions_per_1k / 20
    assert nested.throughput_tok_s > 0.98 * off.throughput_tok_s
