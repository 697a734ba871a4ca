"""A recording of power, replayed through NVML's double, as the router's accounts show it."""

from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest

from router.core.energy.joules import PowerLevels
from router.core.events import SnapshotReceived, WorkerUp
from router.core.state.cluster import Cluster
from router.core.state.group import Group
from router.core.step_fit import LEAST_STEPS
from router.core.types import PoolState, Snapshot, WorkerSpec
from router.core.wire import decode, encode
from tests.support.metered import POWER, Fleet, Meters, Story

WORKERS = 4
LEVELS = PowerLevels(POWER.idle_w, 250.0, POWER.max_w)


class Offline(NamedTuple):
    """Sums over the steps of a story, worked out without the router."""

    steps: int
    imbalance_tokens: int
    waiting_s: float
    timed_s: float


def story(*, time_waits: bool = False) -> Story:
    """A minute of work with pauses in it."""
    fleet = Fleet(WORKERS, seed=7, time_waits=time_waits)
    for _ in range(2):
        fleet.serve(600)
        fleet.drain()
        fleet.rest(4)
    return fleet.story


def group_of(told: Story, meters: Meters) -> Group:
    """The router's, once it has had all snapshots over the wire."""
    cluster = Cluster([WorkerSpec(str(r), "") for r in range(WORKERS)], power_levels=LEVELS)
    for spec_id in cluster.groups["default"].workers:
        cluster.apply(WorkerUp(spec_id))
    for worker, snapshot in told.said:
        reading = meters.at(worker, snapshot.time_s)
        message = msgspec.structs.replace(
            snapshot, power_w=reading.power_w, energy_j=reading.energy_j
        )
        cluster.apply(SnapshotReceived(worker, decode(encode(message)), snapshot.time_s))
    return cluster.groups["default"]


def offline(told: Story) -> Offline:
    """By the definitions: G max L - sum L, and t_l of a line through the steps so far."""
    loads = _loads(told)
    peaks = [max(each) for each, _ in loads]
    waiting_s = timed_s = 0.0
    per_token_s = None
    for number, (each, step_s) in enumerate(loads, 1):
        if per_token_s is not None:
            waiting_s += per_token_s * (WORKERS * max(each) - sum(each))
            timed_s += WORKERS * step_s
        if number % LEAST_STEPS == 0:
            times = [seconds for _, seconds in loads[:number]]
            per_token_s = np.polyfit(peaks[:number], times, 1)[0]
    imbalance = sum(WORKERS * max(each) - sum(each) for each, _ in loads)
    return Offline(len(loads), imbalance, waiting_s, timed_s)


def _loads(told: Story) -> list[tuple[list[int], float]]:
    """Loads of the workers in each step, and its time; tokens of what ended in it included."""
    held: defaultdict[str, dict[str, int]] = defaultdict(dict)
    loads: defaultdict[int, list[int]] = defaultdict(list)
    step_s: dict[int, float] = {}
    for worker, snapshot in told.said:
        ended = sum(held[worker][name] + 1 for name in snapshot.finished)
        held[worker] = {r.id: r.prompt_tokens + r.generated_tokens for r in snapshot.running}
        if _is_step(snapshot):
            loads[snapshot.step].append(sum(held[worker].values()) + ended)
            step_s[snapshot.step] = snapshot.step_s
    return [(loads[step], step_s[step]) for step in sorted(loads)]


def _is_step(snapshot: Snapshot) -> bool:
    return snapshot.step_s > 0


@pytest.fixture(scope="module")
def told() -> Story:
    return story()


@pytest.mark.parametrize("counter", [True, False], ids=["counter", "power only"])
def test_the_parts_add_up_to_the_counter(told: Story, tmp_path: Path, counter: bool) -> None:
    meters = Meters(told.recording(), counter)
    joules = group_of(told, meters).energy.joules
    assert joules.total_j == pytest.approx(meters.used_j(), rel=0.01)
    assert min(joules.useful_j, joules.waiting_j, joules.idle_j) > 0
    assert joules.unknown_j < 0.1 * joules.total_j, "of the first steps alone"


def test_idle_joules_are_those_of_the_pauses(told: Story, tmp_path: Path) -> None:
    joules = group_of(told, Meters(told.recording())).energy.joules
    assert joules.idle_j == pytest.approx(WORKERS * 8 * POWER.idle_w, rel=0.05)


def test_imbalance_and_idle_share_are_those_computed_offline(told: Story, tmp_path: Path) -> None:
    group = group_of(told, Meters(told.recording()))
    totals, by_hand = group.totals[PoolState.EMPTY], offline(told)
    assert (totals.steps, totals.imbalance_tokens) == by_hand[:2]
    # No line fits exactly: a step's time does not count the tokens that it yields, its load does.
    # The router's line weighs steps by their length, the one here does not; that makes 3e-5.
    assert totals.waiting_s == pytest.approx(by_hand.waiting_s, rel=1e-4)
    assert totals.timed_s == pytest.approx(by_hand.timed_s, rel=1e-12)


def test_the_modelled_idle_share_is_that_which_engines_have_timed(
    told: Story, tmp_path: Path
) -> None:
    modelled = group_of(told, Meters(told.recording())).totals[PoolState.EMPTY]
    timing = story(time_waits=True)
    timed = group_of(timing, Meters(timing.recording())).totals[PoolState.EMPTY]
    waited_s = sum(snapshot.waited_s or 0.0 for _, snapshot in timing.said)
    assert timed.waiting_s == pytest.approx(waited_s)
    assert timed.measured_s == pytest.approx(timed.timed_s)
    share = timed.waiting_s / timed.timed_s
    assert modelled.waiting_s / modelled.timed_s == pytest.approx(share, rel=0.02)
