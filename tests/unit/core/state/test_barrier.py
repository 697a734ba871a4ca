"""Sums over barrier steps, by hand."""

from typing import NamedTuple

import pytest
from msgspec.structs import replace

from router.core.state.barrier import StepLedger, StepTotals
from router.core.step_time import StepTime
from router.core.types import PoolState
from tests.support.core import fed, snapshot

EMPTY, WAITING = PoolState.EMPTY, PoolState.WAITING
TOGETHER = {"contested_steps": 1, "together_steps": 1}


class Said(NamedTuple):
    """A worker's report: its load in the step, and what is left of it."""

    worker: str
    step: int
    load: int
    left: int | None = None
    step_s: float = 0.5
    power_w: float | None = None
    decoded: int = 1


def tell(ledger: StepLedger, said: Said, state: PoolState = EMPTY) -> None:
    message = snapshot("delta", 1, step=said.step, step_s=said.step_s, power_w=said.power_w)
    left = said.load if said.left is None else said.left
    shares = fed(said.load, left, grown=said.decoded)
    ledger.report(said.worker, shares, message, state, 0)


def closed(ledger: StepLedger, *reports: Said, live: str = "ab") -> list[bool]:
    """Whether each report has completed a step."""
    done = []
    for said in reports:
        tell(ledger, said)
        done.append(ledger.complete(live, EMPTY))
    return done


def steps(ledger: StepLedger) -> tuple[int, int, int]:
    """Steps, imbalance and load so far."""
    totals = ledger.totals[EMPTY]
    return totals.steps, totals.imbalance_tokens, totals.load_tokens


def test_a_step_is_closed_by_the_last_live_worker() -> None:
    ledger = StepLedger()
    reports = [
        Said("a", 1, 100, step_s=0.5, power_w=200.0, decoded=3),
        Said("b", 1, 60, step_s=0.75, power_w=100.0, decoded=2),
    ]
    assert closed(ledger, *reports) == [False, True]
    assert ledger.totals[EMPTY] == StepTotals(1, 40, 100, 160, 2, 0.75, 300.0 * 0.75, 5, **TOGETHER)
    assert ledger.totals[WAITING] == StepTotals()


def test_what_prompts_add_is_what_the_worker_with_most_of_them_computes() -> None:
    ledger = StepLedger()
    for step, cost in ((1, None), (2, StepTime(1e-3, 1e-9, per_prompt_token_s=2e-5))):
        ledger.fixed = cost
        for worker, prompt_tokens in (("a", 100), ("b", 400)):
            told = replace(
                snapshot("delta", step, step_s=0.5), scheduled_prefill_tokens=prompt_tokens
            )
            ledger.report(worker, fed(10, 10), told, EMPTY, 0)
            ledger.complete("ab", EMPTY)
    totals = ledger.totals[EMPTY]
    assert totals.prompt_tokens == 1000
    assert totals.prompt_s == pytest.approx(400 * 2e-5), "of the step whose cost is known"


@pytest.mark.parametrize("lacking", [(), ("idle_steps",)])
def test_ranks_whose_idle_steps_are_unknown_claim_no_barrier(lacking: tuple[str, ...]) -> None:
    """Their numbers agree by chance."""
    ledger = StepLedger()
    ledger.fixed = StepTime(1e-3, 1e-6)
    closed(ledger, Said("a", 1, 100), Said("b", 1, 60))
    assert ledger.barrier
    for step in (2, 3):
        for worker, load in (("a", 100), ("b", 60)):
            told = replace(snapshot("delta", step, step_s=0.5), unreported=lacking)
            ledger.report(worker, fed(load, load), told, EMPTY, 0)
            ledger.complete("ab", EMPTY)
    totals = ledger.totals[EMPTY]
    assert (totals.steps, totals.imbalance_tokens) == (3, 3 * 40)
    counted = 1 if lacking else 3
    assert (totals.contested_steps, totals.timed_s > 1.0) == (counted, not lacking)
    assert ledger.barrier is (None if lacking else True)
    closed(ledger, Said("a", 4, 100), Said("b", 4, 60))
    assert ledger.barrier is True, "what is known counts from there on"


def test_averages_are_differences_of_totals() -> None:
    ledger = StepLedger()
    assert closed(ledger, Said("a", 1, 10), Said("b", 1, 4), Said("b", 2, 5), Said("a", 2, 11)) == [
        False,
        True,
        False,
        True,
    ]
    assert ledger.totals[EMPTY] == StepTotals(
        2, 6 + 6, 21, 30, 4, 1.0, 0.0, 4, contested_steps=2, together_steps=2
    )


def test_the_pool_decides_where_a_step_counts() -> None:
    ledger = StepLedger()
    tell(ledger, Said("a", 1, 100))
    ledger.complete("a", WAITING)
    assert ledger.totals[WAITING].steps == 1
    assert ledger.totals[EMPTY].steps == 0


def test_a_later_step_closes_the_one_before() -> None:
    ledger = StepLedger()
    reports = [Said("a", 1, 100), Said("b", 1, 60), Said("a", 2, 101), Said("a", 3, 102)]
    assert closed(ledger, *reports) == [False, True, False, False]
    assert steps(ledger) == (2, 40 + 41, 160 + 161), "b's lost report is its load held"


def test_an_idle_worker_counts_as_zero() -> None:
    ledger = StepLedger()
    closed(ledger, Said("a", 1, 100), Said("b", 1, 60, left=0), Said("a", 2, 101), Said("a", 3, 1))
    assert steps(ledger) == (2, 40 + 101, 160 + 101)


def test_what_ended_between_steps_is_no_longer_held() -> None:
    ledger = StepLedger()
    closed(ledger, Said("a", 1, 100), Said("b", 1, 60), Said("b", 1, 60, left=20))
    closed(ledger, Said("a", 2, 101), Said("a", 3, 102))
    assert steps(ledger) == (2, 40 + 81, 160 + 121)


@pytest.mark.parametrize("slow_first", [True, False])
def test_of_workers_that_count_apart_the_furthest_is_the_clock(slow_first: bool) -> None:
    ledger = StepLedger()
    closed(ledger, Said("a", 100, 50), Said("b", 5, 10))
    for step in range(1, 4):
        both = [Said("a", 100 + step, 50), Said("b", 5 + step, 10, step_s=9.0)]
        closed(ledger, *(reversed(both) if slow_first else both))
    closed(ledger, Said("a", 104, 50))
    assert steps(ledger) == (4, 4 * 40, 4 * 60), "each step of the furthest once"
    assert ledger.totals[EMPTY].step_s == 4 * 0.5, "and lasts as long as the furthest says"


def test_tokens_of_the_slower_are_not_lost() -> None:
    ledger = StepLedger()
    closed(ledger, Said("a", 100, 50), Said("b", 5, 10))
    closed(ledger, *(Said("b", step, 10) for step in range(6, 16)))
    assert steps(ledger)[0] == 1
    closed(ledger, Said("a", 101, 50), Said("b", 16, 10))
    assert ledger.totals[EMPTY].output_tokens == 2 + 10 + 2


def test_the_clock_passes_to_others_when_the_furthest_is_idle() -> None:
    ledger = StepLedger()
    closed(ledger, Said("a", 100, 50, left=0), Said("b", 5, 10))
    closed(ledger, Said("b", 6, 11), Said("b", 7, 12), Said("b", 8, 13))
    assert steps(ledger) == (3, 40 + 11 + 12, 60 + 11 + 12)
    closed(ledger, Said("a", 101, 50), Said("b", 9, 14))
    assert steps(ledger)[0] == 5, "b's eighth, and one of both"


def test_the_clock_passes_on_when_the_furthest_is_emptied_between_steps() -> None:
    ledger = StepLedger()
    closed(ledger, Said("a", 100, 50), Said("b", 5, 10), Said("a", 100, 50, left=0))
    closed(ledger, Said("b", 6, 11), Said("b", 7, 12))
    assert steps(ledger) == (2, 40 + 11, 60 + 11)


def test_a_repeated_step_is_none() -> None:
    ledger = StepLedger()
    reports = [Said("a", 1, 100), Said("a", 1, 100, left=0), Said("b", 1, 60)]
    assert closed(ledger, *reports) == [False, False, True]
    assert steps(ledger) == (1, 40, 160)


def test_what_idle_workers_repeat_is_no_step() -> None:
    ledger = StepLedger()
    closed(ledger, *(Said(worker, 7, 100, left=0) for worker in "ab"))
    done = steps(ledger)
    closed(ledger, *(Said(worker, 7, 0) for worker in "abab"))
    closed(ledger, Said("a", 8, 10), Said("b", 8, 10))
    assert steps(ledger) == (done[0] + 1, done[1], done[2] + 20)


def test_a_worker_that_left_no_longer_counts() -> None:
    ledger = StepLedger()
    closed(ledger, Said("a", 7, 100), Said("b", 7, 60), Said("b", 8, 61))
    ledger.leave("b")
    assert closed(ledger, Said("a", 8, 101), live="a") == [True]
    assert steps(ledger) == (2, 40, 160 + 101)


def test_what_an_engine_at_rest_says_first_is_no_step() -> None:
    ledger = StepLedger()
    greetings = [Said(worker, 7, 0, step_s=0.0, decoded=0) for worker in "abab"]
    assert closed(ledger, *greetings) == [False] * 4
    assert steps(ledger) == (0, 0, 0)
    closed(ledger, Said("a", 8, 100), Said("a", 9, 110), Said("b", 9, 40))
    assert steps(ledger) == (2, 100 + 70, 100 + 150)


def test_a_restarted_engine_counts_its_steps_anew() -> None:
    ledger = StepLedger()
    closed(ledger, Said("a", 900, 100), Said("b", 900, 60))
    ledger.leave("a")
    assert closed(ledger, Said("a", 1, 10)) == [False]
    ledger.leave("b")
    assert closed(ledger, Said("b", 1, 4)) == [False]
    assert closed(ledger, Said("a", 2, 11), Said("b", 2, 5)) == [False, True]
    assert steps(ledger) == (2, 40 + 6, 160 + 16)


def test_leaving_twice_is_leaving_once() -> None:
    ledger = StepLedger()
    ledger.leave("a")
    ledger.leave("a")
    assert closed(ledger, Said("a", 0, 1), live="a") == [True]


def test_whether_there_is_a_barrier_is_known_by_the_last_contested_steps() -> None:
    ledger = StepLedger()
    closed(ledger, Said("a", 1, 9), Said("b", 1, 0))
    assert (ledger.barrier, ledger.totals[EMPTY].together_share) == (None, None)
    for step in range(2, 12):
        closed(ledger, Said("a", step, 9), Said("b", step, 5))
    assert (ledger.barrier, ledger.totals[EMPTY].together_share) == (True, 1.0)
    for step in range(12, 12 + 600):
        closed(ledger, Said("a", step, 9), Said("b", 5000 + step, 5))
    assert ledger.barrier is False
    # Engines that are started anew behind a barrier: it is known soon.
    for worker in "ab":
        ledger.leave(worker)
    for step in range(1, 2000):
        closed(ledger, Said("a", step, 9), Said("b", step, 5))
    assert ledger.barrier is True


def step_of_both(
    ledger: StepLedger, step: int, numbers: tuple[int, int], order: str = "ab", epoch: str = "e1"
) -> None:
    """A barrier step that a and b make, by their engines' numbers; its length follows a's load."""
    load = 100 + step % 50
    told = dict(zip("ab", numbers, strict=True))
    for worker in order:
        message = snapshot(
            "delta",
            1,
            step=told[worker],
            step_s=0.01 + load * 1e-4,
            epoch=epoch if worker == "b" else "e1",
        )
        message = replace(message, time_s=step * 0.02 + (worker == order[1]) * 0.001)
        held = load if worker == "a" else 60
        ledger.report(worker, fed(held, held, running=1), message, EMPTY, 0)
        ledger.complete("ab", EMPTY)


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_one_rank_that_starts_anew_leaves_the_waiting_share_known(order: str) -> None:
    ledger = StepLedger()
    for step in range(1, 200):
        step_of_both(ledger, step, (step, step))
    before = ledger.totals[EMPTY]
    assert before.waiting_s > 0
    ledger.leave("b")
    for step in range(200, 400):  # the other one has waited for it
        step_of_both(ledger, step, (step, step - 199), order, "e2")
    since = ledger.totals[EMPTY] - before
    assert since.steps == pytest.approx(200, abs=1)
    assert since.timed_s == pytest.approx(2 * since.step_s, rel=0.02)
    assert since.waiting_s / since.timed_s == pytest.approx(
        before.waiting_s / before.timed_s, rel=0.05
    )
    assert since.contested_steps - since.together_steps <= 1


def test_a_rank_that_starts_anew_and_is_silent_later_keeps_its_count() -> None:
    ledger = StepLedger()
    for step in range(1, 200):
        step_of_both(ledger, step, (step, step))
    ledger.leave("b")
    for step in range(200, 300):
        step_of_both(ledger, step, (step, step - 199), "ab", "e2")
    ledger.leave("b")  # the same engine goes on
    before = ledger.totals[EMPTY]
    for step in range(300, 400):
        step_of_both(ledger, step, (step, step - 199), "ab", "e2")
    since = ledger.totals[EMPTY] - before
    assert since.contested_steps == pytest.approx(100, abs=1)
    assert since.together_steps == pytest.approx(100, abs=1)


def test_a_few_steps_together_prove_no_barrier() -> None:
    ledger = StepLedger()
    for step in range(1, 20):
        step_of_both(ledger, step, (step, step))
    ledger.leave("b")
    before = ledger.totals[EMPTY]
    for step in range(20, 60):
        step_of_both(ledger, step, (step, step - 19), "ab", "e2")
    assert (ledger.totals[EMPTY] - before).together_steps == 0


def as_loaded(
    ledger: StepLedger, worker: str, step: int, number: int, epoch: str, late_s: float = 0.0
) -> None:
    """A worker's part in a step that leaves a and b the same load."""
    load = 100 + 7 * (step % 50)
    message = snapshot("delta", 1, step=number, step_s=0.01 + load * 1e-4, epoch=epoch)
    message = replace(message, time_s=step * 0.05 + late_s)
    ledger.report(worker, fed(load, load, running=1), message, EMPTY, 0)
    ledger.complete("ab", EMPTY)


@pytest.mark.parametrize("late_s", [0.001, -0.001])
@pytest.mark.parametrize("order", ["ab", "ba"])
def test_loads_of_one_that_starts_anew_are_set_beside_those_of_the_same_step(
    order: str, late_s: float
) -> None:
    ledger = StepLedger()
    for step in range(1, 200):
        as_loaded(ledger, "a", step, step, "e1")
        as_loaded(ledger, "b", step, step, "e1", late_s)
    assert ledger.totals[EMPTY].imbalance_tokens == 0
    ledger.leave("b")
    for step in range(200, 400):
        told = {"a": (step, "e1", 0.0), "b": (step - 199, "e2", late_s)}
        for worker in order:
            as_loaded(ledger, worker, step, *told[worker])
    assert ledger.totals[EMPTY].imbalance_tokens <= 2 * 450, "of the steps without b"


@pytest.mark.parametrize("shared", [True, False])
def test_a_shared_count_needs_no_clocks_that_agree(shared: bool) -> None:
    """The second rank's host is ahead by a step: without the count, a step's loads are mixed up."""
    ledger = StepLedger()
    before = ledger.totals[EMPTY]
    for step in range(1, 600):
        if step == 200:
            ledger.leave("b")
            before = ledger.totals[EMPTY]
        own = step if step < 200 else step - 199
        for worker, number, epoch in (("a", step, "e1"), ("b", own, "e1" if own == step else "e2")):
            load = 100 + 7 * (step % 50)
            message = snapshot("delta", 1, step=number, step_s=0.02, epoch=epoch)
            ahead_s = 0.03 if worker == "b" else 0.0
            message = replace(message, time_s=step * 0.02 + ahead_s, wave_step=step * shared)
            ledger.report(worker, fed(load, load, running=1), message, EMPTY, 0)
            ledger.complete("ab", EMPTY)
    imbalance = (ledger.totals[EMPTY] - before).imbalance_tokens
    assert (imbalance < 2 * 450) == shared, "but for the steps without b"


def test_heartbeats_of_a_rank_that_rests_for_many_waves_are_no_steps() -> None:
    ledger = StepLedger()

    def report(worker: str, wave: int, load: int, step_s: float = 0.02) -> None:
        message = snapshot("delta", 1, step=1 + wave, step_s=step_s)
        message = replace(message, wave=wave, wave_step=1)
        ledger.report(worker, fed(load, 0, running=load > 0), message, EMPTY, 0)
        ledger.complete("ab", EMPTY)

    report("b", 0, 50)
    for wave in range(8):
        report("a", wave, 100)
        for _ in "again":
            report("b", 0, 0, 0.0)
    report("a", 8, 100)
    assert steps(ledger) == (8, 50 + 7 * 100, 150 + 7 * 100)


def test_one_whose_first_step_is_told_late_is_set_beside_the_step_before() -> None:
    ledger = StepLedger()
    for step in range(1, 200):
        as_loaded(ledger, "a", step, step, "e1")
        as_loaded(ledger, "b", step, step, "e1")
    ledger.leave("b")
    for worker, ahead, epoch in (("a", 0, "e1"), ("b", 199, "e2")):
        for step in (200, 201):
            as_loaded(ledger, worker, step, step - ahead, epoch)
    before = ledger.totals[EMPTY]
    for step in range(202, 400):
        as_loaded(ledger, "a", step, step, "e1")
        as_loaded(ledger, "b", step, step - 199, "e2")
    assert (ledger.totals[EMPTY] - before).imbalance_tokens == 0


def test_steps_that_ranks_without_a_barrier_make_together_by_chance_teach_nothing() -> None:
    ledger = StepLedger()
    for step in range(1, 600):
        load = 100 + step % 50
        for worker in "ab" if step % 10 == 0 else "a":
            held = load if worker == "a" else 60
            message = snapshot("delta", 1, step=step, step_s=0.01 + load * 1e-4)
            message = replace(message, time_s=0.02 * step)
            ledger.report(worker, fed(held, held, running=1), message, EMPTY, 0)
            ledger.complete("ab", EMPTY)
    totals = ledger.totals[EMPTY]
    assert ledger.barrier is False
    assert totals.together_steps > 50
    assert totals.timed_s == 0


def test_ranks_without_a_barrier_teach_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, learned = StepLedger(), list[int]()
    for step in range(1, 101):
        if ledger.barrier is False:
            monkeypatch.setattr(ledger.step_fit, "observe", lambda loads, *_: learned.extend(loads))
        for number, worker in enumerate("abcd", 1):
            tell(ledger, Said(worker, 1000 * number + step, 10 * number))
    assert len(learned) < 100
    assert sorted(learned[-4:]) == [10, 20, 30, 40]
    assert learned[-8:-4] == learned[-4:]


@pytest.mark.parametrize("phase", [0, 1])
def test_a_rank_that_steps_half_as_often_teaches_as_often_as_it_can(
    monkeypatch: pytest.MonkeyPatch, phase: int
) -> None:
    ledger, learned = StepLedger(), list[int]()
    for step in range(1, 401):
        if ledger.barrier is False:
            monkeypatch.setattr(ledger.step_fit, "observe", lambda loads, *_: learned.extend(loads))
        tell(ledger, Said("a", step, 10))
        if step % 2 == phase:
            tell(ledger, Said("b", 1000 + step // 2, 20))
    assert len(learned) > 100
    assert learned.count(20) == pytest.approx(len(learned) / 2, abs=2)


def test_a_rank_that_was_silent_counts_on_and_one_that_starts_while_others_rest_waits() -> None:
    ledger = StepLedger()
    for step in range(1, 200):
        step_of_both(ledger, step, (step, step))
    ledger.leave("b")
    for step in range(200, 210):
        step_of_both(ledger, step, (step, step))
    known = ledger.totals[EMPTY].timed_s
    tell(ledger, Said("a", 209, 0, left=0))
    ledger.leave("b")
    alone = replace(snapshot("delta", 1, step=1, step_s=0.02, epoch="e2"), time_s=5.0)
    ledger.report("b", fed(60, 60, running=1), alone, EMPTY, 0)
    for step in range(300, 310):
        step_of_both(ledger, step, (step, step - 290), "ab", "e2")
    assert ledger.totals[EMPTY].timed_s - known > 9 * 2 * 0.01


def test_one_that_starts_while_others_rest_may_fall_silent_before_they_meet() -> None:
    ledger = StepLedger()
    for step in range(1, 200):
        step_of_both(ledger, step, (step, step))
    for worker in "ab":
        tell(ledger, Said(worker, 199, 0, left=0))
    resting = replace(snapshot("delta", 1, step=0, step_s=0.0, epoch="e2"), time_s=5.0)
    ledger.leave("b")
    ledger.report("b", fed(0, 0), resting, EMPTY, 0)
    ledger.leave("b")
    before = ledger.totals[EMPTY]
    for step in range(300, 400):
        step_of_both(ledger, step, (step - 100, step - 299), "ab", "e2")
    since = ledger.totals[EMPTY] - before
    assert since.together_steps >= 99


def test_ranks_that_never_stepped_together_are_not_taken_to_after_a_restart() -> None:
    ledger = StepLedger()
    for step in range(1, 200):
        step_of_both(ledger, step, (step, step + 1000))
    ledger.leave("b")
    before = ledger.totals[EMPTY]
    for step in range(205, 405):
        step_of_both(ledger, step, (step, step - 204), "ab", "e2")
    assert ledger.totals[EMPTY].timed_s == before.timed_s


def test_a_rank_without_step_time_and_all_that_start_anew_find_each_other() -> None:
    ledger = StepLedger()
    for step in range(1, 200):
        step_of_both(ledger, step, (step, step))
    ledger.leave("a")
    ledger.leave("b")
    for worker, number in (("a", 7), ("b", 3)):
        message = snapshot("delta", 1, step=number, epoch="e3")
        ledger.report(worker, fed(50, 50, running=1), message, EMPTY, 0)
    assert ledger.complete("ab", EMPTY)
    assert ledger.totals[EMPTY].steps == 200
