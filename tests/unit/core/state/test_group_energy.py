"""A group's joules by what they were spent on, step by step."""

import msgspec
import pytest

from router.core.energy.joules import PowerLevels
from router.core.events import PowerTold
from router.core.state.barrier import StepLedger
from router.core.state.closed_step import ClosedStep
from router.core.step_time import Work
from router.core.types import PoolState, Snapshot
from tests.support.core import fed, snapshot

EMPTY = PoolState.EMPTY
LEVELS = PowerLevels(100.0, 200.0, 400.0)
C, T_L = 5e-3, 1e-6


def said(step: int, step_s: float, time_s: float, **power: float | None) -> Snapshot:
    message = snapshot("delta", 1, step=step, step_s=step_s)
    return msgspec.structs.replace(message, time_s=time_s, **power)


class Group:
    """Two ranks that step together; each has a counter that runs at some power."""

    def __init__(self, levels: PowerLevels | None = LEVELS) -> None:
        self.ledger = StepLedger(levels)
        self.counted = {"a": 1000.0, "b": 50.0}
        self.now_s = 0.0
        self.steps = 0

    def use(self, seconds: float, **watts: float) -> None:
        self.now_s += seconds
        for worker, power_w in watts.items():
            self.counted[worker] += power_w * seconds

    def tell(self, step: int, step_s: float, loads: dict[str, tuple[int, int]]) -> None:
        for worker, (load, left) in loads.items():
            message = said(step, step_s, self.now_s, energy_j=self.counted[worker])
            self.ledger.report(worker, fed(load, left), message, EMPTY, 0)
            self.ledger.complete("ab", EMPTY)

    def step(self, a: int, b: int, *, left: bool = True) -> None:
        self.steps += 1
        step_s = C + T_L * max(a, b)
        self.use(step_s, a=300.0, b=300.0)
        self.tell(self.steps, step_s, {"a": (a, a * left), "b": (b, b * left)})

    def learn(self) -> None:
        """Steps of different loads, until what one costs is known."""
        for number in range(64):
            self.step(1000 + 10 * number, 1000 + 10 * number)


def test_joules_add_up_to_the_counters_and_waiting_is_the_models() -> None:
    group = Group()
    group.learn()
    before, first = group.ledger.energy.joules, sum(group.counted.values())
    group.step(10_000, 5_000)
    found, used = group.ledger.energy.joules, sum(group.counted.values()) - first
    assert found.total_j - before.total_j == pytest.approx(used)
    step_s = C + T_L * 10_000
    share = T_L * 5_000 / step_s
    waiting = 300 * step_s * share * 200 / (share * 200 + (1 - share) * 400)
    assert found.waiting_j - before.waiting_j == pytest.approx(waiting)
    assert found.unknown_j == before.unknown_j


def test_the_first_steps_are_known_only_as_a_whole() -> None:
    group = Group()
    group.step(100, 50)
    group.step(101, 51)
    used = 2 * 300 * (C + T_L * 101)  # a counter counts from its first reading on
    found = group.ledger.energy.joules
    assert found.unknown_j == pytest.approx(used)
    assert (found.useful_j, found.waiting_j, found.idle_j) == (0, 0, 0)


def test_what_is_used_with_nothing_to_run_is_idle() -> None:
    group = Group()
    group.learn()
    group.step(2000, 2000, left=False)
    before = group.ledger.energy.joules
    group.use(10.0, a=100.0, b=110.0)
    group.tell(group.steps, 1.0, {"a": (2000, 0), "b": (2000, 0)})
    found = group.ledger.energy.joules
    assert found.idle_j - before.idle_j == pytest.approx(2100)
    assert (found.useful_j, found.waiting_j) == (before.useful_j, before.waiting_j)
    group.use(5.0, a=100.0, b=100.0)
    group.step(2000, 2000)
    step_s = C + T_L * 2000
    idle, busy = 100 * 5.0, 400 * step_s
    gap = 2 * (500 + 300 * step_s) * idle / (idle + busy)
    after = group.ledger.energy.joules
    assert after.idle_j - found.idle_j == pytest.approx(gap)
    from_first_reading = sum(group.counted.values()) - 1050 - 2 * 300 * (C + T_L * 1000)
    assert after.total_j == pytest.approx(from_first_reading)


def test_a_counter_that_is_read_seldom_is_divided_by_all_steps_since() -> None:
    group = Group()
    group.learn()
    before, first = group.ledger.energy.joules, dict(group.counted)
    step_s = C + T_L * 10_000
    for _ in range(3):
        group.steps += 1
        group.use(step_s, a=300.0, b=300.0)
        told, group.counted = group.counted, first
        group.tell(group.steps, step_s, {"a": (10_000, 10_000), "b": (5_000, 5_000)})
        group.counted = told
    assert group.ledger.energy.joules == before
    group.step(10_000, 5_000, left=False)
    found = group.ledger.energy.joules
    assert found.total_j - before.total_j == pytest.approx(8 * 300 * step_s)
    share = T_L * 5_000 / step_s
    waiting = 4 * 300 * step_s * share * 200 / (share * 200 + (1 - share) * 400)
    assert found.waiting_j - before.waiting_j == pytest.approx(waiting)


def test_a_meter_that_cannot_be_read_for_a_while_loses_nothing() -> None:
    group = Group()
    group.step(100, 50)
    missed = C + T_L * 101
    group.use(missed, a=300.0, b=300.0)
    for worker in "ab":
        group.ledger.report(worker, fed(101, 101), said(2, missed, group.now_s), EMPTY, 0)
    group.steps = 2
    group.step(102, 52)
    assert group.ledger.energy.joules.total_j == pytest.approx(2 * 300 * (missed + C + T_L * 102))


def test_a_meter_counts_from_its_first_reading_on() -> None:
    ledger = StepLedger(LEVELS)
    for step in range(1, 6):
        counted_j = 100.0 * step
        for worker, energy_j in (("a", counted_j), ("b", counted_j if step >= 4 else None)):
            message = said(step, 0.5, 0.5 * step, energy_j=energy_j)
            ledger.report(worker, fed(10, 10), message, EMPTY, 0)
            ledger.complete("ab", EMPTY)
    fit = ledger.energy.level_fit
    assert fit.seconds == [0.0] * 3
    assert fit.unknown_s == pytest.approx((4 + 1) * 0.5)


def test_a_request_has_no_part_in_what_was_used_before_it_came() -> None:
    ledger = StepLedger(LEVELS)
    told = [(1, 0.5, 0, 1000.0), (2, 1.0, 0, 1200.0), (3, 11.0 - 1.0, 10, 1200.0 + 850 + 200)]
    for step, time_s, held, energy_j in told:
        message = said(step, 0.5, time_s, energy_j=energy_j)
        message = msgspec.structs.replace(message, waited_s=0.0)
        asked = {"r": Work(held, 1)} if held else {}
        ledger.report("a", fed(10, held, asked=asked), message, EMPTY, 0)
        ledger.complete("a", EMPTY)
    assert ledger.energy.joules.idle_j == pytest.approx(850)
    assert ledger.energy.of_request("a", "r") == pytest.approx(200)


def test_waiting_time_is_that_of_the_imbalance() -> None:
    group = Group()
    group.learn()
    before = group.ledger.totals[EMPTY]
    group.step(10_000, 4_000)
    totals = group.ledger.totals[EMPTY]
    assert totals.waiting_s - before.waiting_s == pytest.approx(T_L * 6_000)
    assert totals.timed_s - before.timed_s == pytest.approx(2 * (C + T_L * 10_000))


def test_a_wait_that_an_engine_has_timed_counts_in_place_of_the_models() -> None:
    group = Group()
    group.learn()
    seen: list[ClosedStep] = []
    group.ledger.on_step = seen.append
    before, joules = group.ledger.totals[EMPTY], group.ledger.energy.joules
    step_s = C + T_L * 10_000
    group.use(step_s, a=300.0, b=300.0)
    for worker, load, waited_s in (("a", 10_000, None), ("b", 4_000, 0.25 * step_s)):
        told = said(65, step_s, group.now_s, energy_j=group.counted[worker])
        told = msgspec.structs.replace(told, waited_s=waited_s)
        group.ledger.report(worker, fed(load, load), told, EMPTY, 0)
        group.ledger.complete("ab", EMPTY)
    totals, found = group.ledger.totals[EMPTY], group.ledger.energy.joules
    assert totals.waiting_s - before.waiting_s == pytest.approx(0.25 * step_s)
    assert totals.timed_s - before.timed_s == pytest.approx(2 * step_s)
    assert totals.measured_s - before.measured_s == pytest.approx(step_s)
    waiting = 300 * step_s * 0.25 * 200 / (0.25 * 200 + 0.75 * 400)
    assert found.waiting_j - joules.waiting_j == pytest.approx(waiting)
    assert seen[0].waited_s is None, "one of both has not timed itself"
    group.steps = 65
    group.step(10_000, 10_000)
    assert group.ledger.totals[EMPTY].measured_s == totals.measured_s, "of that step alone"


def test_timed_waits_need_no_model() -> None:
    ledger = StepLedger(LEVELS)
    seen: list[ClosedStep] = []
    ledger.on_step = seen.append
    for step in (1, 2):
        for worker, waited_s in (("a", 0.0), ("b", 0.3)):
            told = msgspec.structs.replace(
                said(step, 0.5, 0.5 * step, power_w=300.0), waited_s=waited_s
            )
            ledger.report(worker, fed(10, 10), told, EMPTY, 0)
            ledger.complete("ab", EMPTY)
    totals = ledger.totals[EMPTY]
    assert totals.waiting_s == pytest.approx(2 * 0.3)
    assert totals.timed_s == totals.measured_s == pytest.approx(2.0)
    assert [step.waited_s for step in seen] == [0.3, 0.3]
    assert [step.waiting_s for step in seen] == [None, None]
    assert ledger.energy.joules.unknown_j == 0
    ledger.report("b", fed(10, 10), msgspec.structs.replace(told, step=3), EMPTY, 0)
    ledger.leave("b")
    ledger.report("a", fed(10, 10), said(3, 0.5, 1.5), EMPTY, 0)
    assert ledger.complete("a", EMPTY)
    assert ledger.totals[EMPTY].measured_s == pytest.approx(2.0)


def test_nobody_waits_for_longer_than_the_step() -> None:
    ledger = StepLedger(LEVELS)
    told = msgspec.structs.replace(said(1, 0.5, 0.5, power_w=300.0), waited_s=0.7)
    ledger.report("a", fed(10, 10), told, EMPTY, 0)
    ledger.complete("a", EMPTY)
    totals = ledger.totals[EMPTY]
    assert totals.waiting_s == totals.timed_s == 0.5
    assert ledger.energy.joules.waiting_j == pytest.approx(150)


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_an_idle_engine_whose_clock_is_set_has_used_nothing_meanwhile(jump_s: float) -> None:
    ledger = StepLedger(LEVELS)
    for step, time_s in ((1, 0.0), (1, 1.0), (1, 2.0 + jump_s), (1, 3.0 + jump_s)):
        message = said(step, 0.0, 5000.0 + time_s, power_w=100.0)
        ledger.report("a", fed(0, 0), message, EMPTY, 0)
        ledger.complete("a", EMPTY)
    assert ledger.energy.joules.total_j == pytest.approx(200)
    assert ledger.energy.level_fit.seconds[0] == pytest.approx(2)


def test_ranks_that_step_apart_do_not_wait_for_each_other() -> None:
    group = Group()
    for number in range(200):
        load = 1000 + 10 * number
        group.use(C, a=300.0, b=300.0)
        group.tell(1000 + number, C + T_L * load, {"a": (load, load)})
        group.tell(number, C, {"b": (500, 500)})
    assert group.ledger.totals[EMPTY].timed_s == 0
    assert group.ledger.energy.joules.waiting_j == 0
    assert group.ledger.energy.joules.unknown_j > 0


def test_power_stands_in_for_a_counter_and_who_leaves_takes_nothing_along() -> None:
    ledger = StepLedger()
    ledger.report("a", fed(10, 10), said(1, 0.5, 1.0, power_w=200.0), EMPTY, 0)
    ledger.leave("a")
    assert ledger.energy.joules.unknown_j == pytest.approx(100)
    ledger.report("a", fed(10, 10), said(1, 0.5, 2.0), EMPTY, 0)
    ledger.report("b", fed(10, 10), said(1, 0.5, 2.0, power_w=100.0), EMPTY, 0)
    assert ledger.complete("ab", EMPTY)
    assert ledger.energy.joules.unknown_j == pytest.approx(150)
    ledger.report("b", fed(10, 10), said(2, 0.5, 3.0), EMPTY, 0)
    ledger.leave("b")
    ledger.leave("b")
    assert ledger.energy.joules.total_j == pytest.approx(150)


def test_what_a_meter_counts_while_its_worker_is_away_is_unknown() -> None:
    group = Group()
    group.learn()
    before, first = group.ledger.energy.joules, sum(group.counted.values())
    group.ledger.leave("a")
    group.use(5.0, a=300.0)
    for _ in range(3):
        group.step(2000, 1000)
    after = group.ledger.energy.joules
    assert after.total_j - before.total_j == pytest.approx(sum(group.counted.values()) - first)
    missed_j = 300 * (5 + C + T_L * 2000)
    assert after.unknown_j - before.unknown_j == pytest.approx(missed_j)


def test_a_meter_that_tells_later_counts_from_where_it_was() -> None:
    group = Group()
    group.learn()
    before, at_j = group.ledger.energy.joules, group.counted["a"]
    group.ledger.leave("a")
    group.use(5.0, a=300.0)
    group.ledger.report("a", fed(0, 0), said(group.steps, 0.0, group.now_s), EMPTY, 0)
    assert group.ledger.energy.joules == before
    power = PowerTold("a", None, group.counted["a"], group.now_s)
    group.ledger.leave("a")
    group.ledger.energy.told("a", power, idle=True)
    spent_j = group.ledger.energy.joules.total_j - before.total_j
    assert spent_j == pytest.approx(group.counted["a"] - at_j)


def test_another_engine_in_its_place_has_a_meter_of_its_own() -> None:
    group = Group()
    group.learn()
    group.ledger.leave("a")
    before = group.ledger.energy.joules
    group.counted["a"] += 1e9
    message = msgspec.structs.replace(
        said(group.steps + 1, 0.0, group.now_s, energy_j=group.counted["a"]), epoch="another"
    )
    group.ledger.report("a", fed(0, 0), message, EMPTY, 0)
    assert group.ledger.energy.joules == before
