"""Sums over barrier steps, by hand."""

from typing import NamedTuple

import pytest

from router.barrier import StepLedger, StepShares, StepTotals
from router.types import PoolState
from tests.support.core import snapshot

EMPTY, WAITING = PoolState.EMPTY, PoolState.WAITING


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
    message = snapshot(
        "delta", 1, step=said.step, step_s=said.step_s, power_w=said.power_w, decoded=said.decoded
    )
    left = said.load if said.left is None else said.left
    ledger.report(said.worker, StepShares(said.load, left), message, state)


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
    assert ledger.totals[EMPTY] == StepTotals(1, 40, 100, 160, 2, 0.75, 300.0 * 0.75, 5)
    assert ledger.totals[WAITING] == StepTotals()


def test_averages_are_differences_of_totals() -> None:
    ledger = StepLedger()
    assert closed(ledger, Said("a", 1, 10), Said("b", 1, 4), Said("b", 2, 5), Said("a", 2, 11)) == [
        False,
        True,
        False,
        True,
    ]
    assert ledger.totals[EMPTY] == StepTotals(2, 6 + 6, 21, 30, 4, 1.0, 0.0, 4)


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
