"""Energy that agents tell, as it enters the accounts of a group."""

from dataclasses import replace

import msgspec
import pytest

from router.core.energy.joules import METER_SILENT_S, Joules, PowerLevels
from router.core.events import (
    Arrived,
    Dispatched,
    Ended,
    FeedStale,
    PowerTold,
    SnapshotReceived,
    WorkerDown,
    WorkerUp,
)
from router.core.state.cluster import Cluster
from router.core.types import Outcome, PoolState, Snapshot, WorkerSpec
from tests.support.core import part, request, running, snapshot

C, T_L = 5e-3, 1e-6
LEVELS = PowerLevels(100.0, 200.0, 400.0)


class Site:
    """Workers whose meters an agent reads now and then; ``watts`` are what they draw."""

    def __init__(self, workers: str = "ab") -> None:
        self.cluster = Cluster([WorkerSpec(i, "", slots=8) for i in workers], power_levels=LEVELS)
        self.group = self.cluster.groups["default"]
        self.now_s = 0.0
        self.steps = 0
        self.counted = dict.fromkeys(workers, 1000000.0)
        for worker in workers:
            self.cluster.apply(WorkerUp(worker))
        self.tell()

    def use(self, seconds: float, watts: float = 300.0) -> None:
        self.now_s += seconds
        for worker in self.counted:
            self.counted[worker] += watts * seconds

    def tell(self, power_w: float | None = 300.0) -> None:
        for worker, counted_j in self.counted.items():
            self.cluster.apply(PowerTold(worker, power_w, counted_j, self.now_s))

    def say(self, worker: str, message: Snapshot) -> None:
        message = msgspec.structs.replace(message, time_s=self.now_s)
        self.cluster.apply(SnapshotReceived(worker, message, self.now_s))

    def step(self, **loads: int) -> None:
        self.steps += 1
        step_s = C + T_L * max(loads.values())
        self.use(step_s)
        for worker, load in loads.items():
            told = (running(worker, load),) if load else ()
            self.say(worker, snapshot("full", self.steps, *told, step_s=step_s))

    def learn(self) -> None:
        for number in range(64):
            self.step(a=1000 + 10 * number, b=1000 + 10 * number)
        self.tell()

    @property
    def joules(self) -> Joules:
        return self.group.energy.joules


def test_what_an_agent_counts_is_divided_by_all_steps_since_it_spoke() -> None:
    site = Site()
    site.learn()
    site.step(a=10_000, b=10_000)
    before = site.joules
    for _ in range(9):
        site.step(a=10_000, b=5_000)
    assert site.joules == before, "the agent has not spoken since"
    site.tell()
    site.step(a=10_000, b=10_000)
    step_s = C + T_L * 10_000
    used = 10 * 300 * step_s
    assert site.joules.total_j - before.total_j == pytest.approx(2 * used)
    waiting = 9 * T_L * 5_000 * 200
    whole = (10 * step_s - 9 * T_L * 5_000) * 400 + waiting
    assert site.joules.waiting_j - before.waiting_j == pytest.approx(used * waiting / whole)
    assert site.joules.unknown_j == before.unknown_j


def test_agents_power_is_that_of_steps() -> None:
    site = Site("a")
    site.step(a=10)
    assert site.group.totals[PoolState.EMPTY].energy_j == pytest.approx(300 * (C + T_L * 10))
    site.now_s += METER_SILENT_S
    site.say("a", snapshot("full", 2, running("a", 11), step_s=1.0))
    assert site.group.totals[PoolState.EMPTY].energy_j == pytest.approx(300 * (C + T_L * 10))
    assert site.cluster.worker("a").power_w(site.now_s) is None


def test_an_engine_that_tells_its_own_power_needs_no_agent() -> None:
    site = Site("a")
    site.say("a", snapshot("full", 1, running("a", 10), step_s=0.5, power_w=100.0))
    site.use(9.0)
    site.tell()
    site.say("a", snapshot("full", 2, running("a", 11), step_s=0.5, power_w=100.0))
    assert site.joules.total_j == pytest.approx(100)
    assert site.cluster.worker("a").power_w(site.now_s) == 100
    site.cluster.apply(FeedStale("a"))
    assert site.cluster.worker("a").power_w(site.now_s) == 300
    # Its next engine may tell none.
    site.say("a", snapshot("full", 1, running("a", 10), step_s=0.5, epoch="e2"))
    site.use(1.0)
    site.tell()
    site.say("a", snapshot("full", 2, running("a", 11), step_s=0.5, epoch="e2"))
    assert site.joules.total_j == pytest.approx(100 + 300)


def test_without_steps_energy_is_idle_or_undivided() -> None:
    site = Site("a")
    site.use(1.0, 100.0)
    site.tell()
    assert site.joules == Joules(idle_j=100.0)
    site.cluster.apply(Arrived(request(1)))
    site.cluster.apply(Dispatched(request(1).id, "a"))
    site.use(1.0, 400.0)
    site.tell()
    assert site.joules == Joules(idle_j=100.0, unknown_j=400.0)
    site.cluster.apply(Ended(request(1).id, Outcome.COMPLETED))
    site.tell()
    site.use(1.0, 100.0)
    site.cluster.apply(Arrived(request(2)))
    site.cluster.apply(Dispatched(request(2).id, "a"))
    site.tell()
    assert site.joules == Joules(idle_j=100.0, unknown_j=500.0), "it ran at one of both ends"
    site.use(1.0, 400.0)
    site.cluster.apply(Ended(request(2).id, Outcome.COMPLETED))
    site.tell()
    assert site.joules == Joules(idle_j=100.0, unknown_j=900.0), "it ran at one of both ends"
    site.cluster.apply(WorkerDown("a", "gone"))
    site.use(1.0, 50.0)
    site.tell()
    assert site.joules.unknown_j == pytest.approx(950)


def test_power_without_a_counter_is_integrated_while_it_is_told() -> None:
    site = Site("a")
    site.cluster.apply(PowerTold("a", 100.0, None, 1.0))
    site.cluster.apply(PowerTold("a", 100.0, None, 2.0))
    assert site.joules.total_j == pytest.approx(200)
    site.cluster.apply(PowerTold("a", 100.0, None, 2.0 + METER_SILENT_S))
    site.cluster.apply(PowerTold("a", None, None, 13.0))
    assert site.joules.total_j == pytest.approx(200)


def test_a_feed_takes_an_agents_account_over_and_gives_it_back() -> None:
    site = Site("a")
    site.use(2.0)
    site.tell()
    site.step(a=100)
    site.tell()
    site.step(a=101)
    both = 2 * C + T_L * 201
    assert site.joules.total_j == pytest.approx(600 + 300 * (both - C - T_L * 101))
    site.cluster.apply(FeedStale("a"))
    site.tell()
    site.use(1.0)
    site.tell()
    assert site.joules.total_j == pytest.approx(600 + 300 * both + 300), "the last step's too"


def test_a_prefill_worker_waits_for_nobody() -> None:
    specs = [WorkerSpec("p", "", role="prefill"), WorkerSpec("d", "")]
    cluster = Cluster(specs, power_levels=LEVELS)
    for spec in specs:
        cluster.apply(WorkerUp(spec.id))
    for time_s in (1.0, 2.0):
        cluster.apply(PowerTold("p", 50.0, None, time_s))
    assert cluster.worker("p").power_w(2.0) == 50
    group = cluster.groups["default/prefill"]
    assert group.energy.joules == Joules(idle_j=50.0)
    for number, (counted_j, running_now) in enumerate([(0, 0), (30, 1), (100, 0), (140, 0)]):
        told = (running(part(1), 100, 0, 50),) * running_now
        message = snapshot("full", number, *told, step=min(number, 2), step_s=0.5 * (number > 0))
        message = msgspec.structs.replace(message, energy_j=float(counted_j), time_s=float(number))
        cluster.apply(SnapshotReceived("p", message, 2.0))
    found = group.energy.joules
    assert found.total_j == pytest.approx(50 + 140)
    assert found.idle_j == pytest.approx(50 + 30 * 50 / 250 + 40)
    assert found.useful_j == pytest.approx(30 * 200 / 250 + 70)
    assert group.totals[PoolState.EMPTY].steps == 0


def test_prefill_workers_without_meters_cost_nothing() -> None:
    specs = [WorkerSpec("p", "", role="prefill"), WorkerSpec("d", "")]
    cluster = Cluster(specs)
    cluster.apply(WorkerUp("p"))
    cluster.apply(SnapshotReceived("p", snapshot("full", 1, step_s=0.5), 0.0))
    assert cluster.groups["default/prefill"].energy.joules == Joules()


def test_a_metered_request_is_told_its_joules_while_it_is_on_a_worker() -> None:
    cluster = Cluster([WorkerSpec("a", "", slots=8)])
    cluster.apply(WorkerUp("a"))
    metered = replace(request(1), metered=True)
    assert cluster.energy_j(metered.id) is None
    cluster.apply(Arrived(metered))
    assert cluster.energy_j(metered.id) is None
    cluster.apply(Dispatched(metered.id, "a"))
    assert cluster.energy_j(metered.id) is None
    for number in (1, 2):
        told = running(part(1), 300, number), running("theirs", 100, number)
        message = snapshot("full", number, *told, step_s=0.5, power_w=100.0)
        cluster.apply(SnapshotReceived("a", message, 0.0))
    found = cluster.energy_j(metered.id)
    assert found == pytest.approx(50 * (301 / 402 + 302 / 404))
    cluster.apply(SnapshotReceived("a", snapshot("full", 3, step_s=0.5, power_w=100.0), 0.0))
    assert cluster.energy_j(metered.id) == found
    cluster.apply(Ended(metered.id, Outcome.COMPLETED))
    assert cluster.energy_j(metered.id) is None


def test_a_worker_that_was_silent_for_a_while_takes_nothing_from_its_requests() -> None:
    cluster = Cluster([WorkerSpec("a", "", slots=8)])
    cluster.apply(WorkerUp("a"))
    metered = replace(request(1), metered=True)
    cluster.apply(Arrived(metered))
    cluster.apply(Dispatched(metered.id, "a"))
    for number in (1, 2, 3, 4):
        told = running(part(1), 300, number)
        message = snapshot("full", number, told, step_s=0.5, power_w=100.0)
        cluster.apply(SnapshotReceived("a", message, 0.0))
        if number == 2:
            cluster.apply(FeedStale("a"))
            assert cluster.energy_j(metered.id) == pytest.approx(100)
    assert cluster.energy_j(metered.id) == pytest.approx(200)
    cluster.apply(FeedStale("a"))
    cluster.apply(Ended(metered.id, Outcome.COMPLETED))
    assert cluster.groups["default"].energy.of_request("a", metered.id) is None


def test_what_ends_before_its_step_is_over_leaves_nothing_behind() -> None:
    cluster = Cluster([WorkerSpec(i, "", slots=8) for i in "ab"])
    for worker in "ab":
        cluster.apply(WorkerUp(worker))
        cluster.apply(SnapshotReceived(worker, snapshot("full", 1, power_w=100.0), 0.0))
    metered = replace(request(1), metered=True)
    cluster.apply(Arrived(metered))
    cluster.apply(Dispatched(metered.id, "a"))
    told = snapshot("full", 2, running(part(1), 300, 1), step_s=0.5, power_w=100.0)
    cluster.apply(SnapshotReceived("a", told, 0.0))
    cluster.apply(Ended(metered.id, Outcome.COMPLETED))
    other = snapshot("full", 2, running(part(2), 10, 1), step_s=0.5, power_w=100.0)
    cluster.apply(SnapshotReceived("b", other, 0.0))
    group = cluster.groups["default"]
    assert group.energy.joules.total_j == pytest.approx(100)
    assert group.energy.of_request("a", metered.id) is None


def test_without_meters_what_a_request_uses_is_unknown() -> None:
    cluster = Cluster([WorkerSpec("a", "", slots=8)])
    cluster.apply(WorkerUp("a"))
    metered = replace(request(1), metered=True)
    cluster.apply(Arrived(metered))
    cluster.apply(Dispatched(metered.id, "a"))
    for number in (1, 2):
        told = snapshot("full", number, running(part(1), 300, number), step_s=0.5)
        cluster.apply(SnapshotReceived("a", told, 0.0))
    assert cluster.energy_j(metered.id) is None
    cluster.apply(Ended(metered.id, Outcome.COMPLETED))
    assert cluster.groups["default"].energy.joules == Joules()
