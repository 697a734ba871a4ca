"""Requests and shares as an observer sees them."""

from dataclasses import asdict

import pytest
from msgspec import structs

from router.commands.observe_command import sentence
from router.core.events import FeedStale
from router.core.state.barrier import StepTotals
from router.core.types import PoolState, Snapshot
from router.observe.observed import Seen, SeenRequests, share, total
from tests.support.clusters import cluster_of, show
from tests.support.core import part, running, snapshot


class Watching:
    """A cluster whose snapshots an observer sees; time is what the test says."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.cluster = cluster_of()
        self.group = self.cluster.groups["default"]
        self.told: list[Seen] = []
        self.seen = SeenRequests(self.group, self.told.append)

    def show(self, now_s: float, message: Snapshot, worker: str = "a") -> None:
        show(self.cluster, message, worker_id=worker)
        self.seen.look(worker, message, now_s)

    def fall_silent(self, worker: str = "a") -> None:
        self.cluster.apply(FeedStale(worker))
        self.seen.lose(worker)


def test_a_request_from_its_first_step_to_its_last() -> None:
    watching = Watching()
    watching.show(1.0, snapshot("full", 1, running("x", 50, 0, prefill_left=20)))
    watching.show(2.0, snapshot("delta", 2, running("x", 50, 1)))
    watching.show(3.0, snapshot("delta", 3))
    watching.show(4.0, snapshot("delta", 4, finished=("x",)))
    assert watching.told == [Seen("a", 1.0, 2.0, 50, 3, True)]


def test_requests_of_another_router_like_this_one_are_complete_too() -> None:
    watching = Watching()
    watching.show(1.0, snapshot("full", 1, running(part(1), 50, 1)))
    watching.show(2.0, snapshot("delta", 2, finished=(part(1),)))
    assert watching.told == [Seen("a", 1.0, 1.0, 50, 2, True)]


def test_the_same_id_on_two_workers_is_two_requests() -> None:
    watching = Watching()
    watching.show(1.0, snapshot("full", 1, running("x", 50, 1)))
    watching.show(2.0, snapshot("full", 1, running("x", 70, 1)), "b")
    watching.show(3.0, snapshot("delta", 2, finished=("x",)), "b")
    watching.show(4.0, snapshot("delta", 2, finished=("x",)))
    assert watching.told == [Seen("b", 2.0, 2.0, 70, 2, True), Seen("a", 1.0, 1.0, 50, 2, True)]


def test_a_preempted_request_goes_on_and_one_that_never_comes_back_is_forgotten() -> None:
    watching = Watching()
    both = running("x", 50, 1), running("y", 60, 1)
    watching.show(1.0, snapshot("full", 1, *both))
    watching.show(2.0, snapshot("delta", 2, preempted=("x", "y")))
    watching.show(3.0, snapshot("delta", 3, running("x", 50, 3), finished=("y",)))
    watching.show(4.0, snapshot("delta", 4, finished=("x",)))
    assert watching.told == [Seen("a", 1.0, 1.0, 50, 4, True)]
    watching.show(5.0, snapshot("delta", 5, running("y", 60, 9)))
    watching.show(6.0, snapshot("delta", 6, finished=("y",)))
    assert watching.told[-1] == Seen("a", 5.0, 5.0, 60, 10, True)


def test_a_request_whose_end_nobody_saw_is_not_complete() -> None:
    watching = Watching()
    watching.show(1.0, snapshot("full", 1, running("x", 50, 1), running("y", 60, 1)))
    watching.show(2.0, snapshot("full", 5, running("y", 60, 5)))
    watching.fall_silent()
    watching.seen.end()
    lost = Seen("a", 1.0, 1.0, 50, 2, False), Seen("a", 1.0, 1.0, 60, 5, False)
    assert tuple(watching.told) == lost
    assert not watching.group.departures


def test_requests_of_an_engine_that_was_silent_for_a_while_go_on() -> None:
    watching = Watching()
    three = running("x", 50, 1), running("y", 60, 1), running("z", 70, 1)
    watching.show(1.0, snapshot("full", 1, *three))
    watching.fall_silent()
    watching.show(9.0, snapshot("delta", 2, finished=("y",)))
    assert watching.told == [Seen("a", 1.0, 1.0, 60, 1, True)]
    watching.show(9.1, snapshot("full", 2, running("x", 50, 2)))
    assert watching.told[1:] == [Seen("a", 1.0, 1.0, 70, 1, False)]
    watching.show(9.2, snapshot("delta", 3, finished=("x",)))
    assert watching.told[2:] == [Seen("a", 1.0, 1.0, 50, 3, True)]
    watching.seen.end()
    assert len(watching.told) == 3


def test_an_engine_that_begins_anew_may_call_its_requests_as_before() -> None:
    watching = Watching()
    watching.show(1.0, snapshot("full", 1, running("x", 50, 1), running("y", 50, 1)))
    watching.show(2.0, snapshot("delta", 2, preempted=("y",)))
    both = running("x", 50, 1), running("y", 50, 1)
    watching.show(3.0, snapshot("full", 1, *both, epoch="e2"))
    assert watching.told == [Seen("a", 1.0, 1.0, 50, 2, False)]
    watching.show(4.0, snapshot("delta", 2, finished=("x", "y"), epoch="e2"))
    assert watching.told[1:] == [Seen("a", 3.0, 3.0, 50, 2, True)] * 2


def test_requests_of_an_engine_that_begins_anew_after_a_silence_are_lost() -> None:
    watching = Watching()
    watching.show(1.0, snapshot("full", 1, running("x", 50, 1)))
    watching.fall_silent()
    watching.show(9.0, snapshot("full", 1, running("x", 50, 1), epoch="e2"))
    assert watching.told == [Seen("a", 1.0, 1.0, 50, 1, False)]
    watching.show(9.1, snapshot("delta", 2, finished=("x",), epoch="e2"))
    assert watching.told[1:] == [Seen("a", 9.0, 9.0, 50, 2, True)]


def test_a_request_of_one_step_that_its_engine_shows() -> None:
    watching = Watching()
    watching.show(1.0, snapshot("full", 1))
    watching.show(2.0, snapshot("delta", 2, running("x", 50, 1), finished=("x",)))
    assert watching.told == [Seen("a", 2.0, 2.0, 50, 1, True)]


def test_shares_are_those_of_the_steps_between() -> None:
    watching = Watching()
    assert {*asdict(total(watching.group)).values()} == {0, None}
    before = None
    for step in range(1, 201):
        load = 100 + step % 7
        for worker, tokens in (("a", load), ("b", 50)):
            message = snapshot(
                *("full", step, running("x", tokens, 0)), step_s=0.01 + 1e-4 * load, decoded=1
            )
            show(watching.cluster, message, worker_id=worker)
        if step == 100:
            before = watching.group.every_step
    assert before is not None
    loads = [100 + step % 7 for step in range(101, 201)]
    measured = share(watching.group.every_step, before)
    dt = sum(0.01 + 1e-4 * load for load in loads)
    assert asdict(measured) == {
        "steps": 100,
        "step_s": pytest.approx(dt / 100),
        "imbalance_tokens": pytest.approx(sum(load - 50 for load in loads) / 100),
        "load_tokens": pytest.approx(sum(load + 50 for load in loads) / 200),
        "max_load_tokens": pytest.approx(sum(loads) / 100),
        "idle_share": pytest.approx(sum(1e-4 * (load - 50) for load in loads) / (2 * dt)),
        "measured_share": 0.0,
        "modelled_share": pytest.approx(1.0),
        "throughput_tok_s": pytest.approx(200 / dt),
        "together_share": 1.0,
    }
    assert measured.idle_share_source == "modelled"
    everything = total(watching.group)
    assert everything.steps == watching.group.totals[PoolState.EMPTY].steps
    assert 0.5 < (everything.modelled_share or 0) < 0.8, "at first nobody knew what a token costs"


def test_waits_that_engines_have_timed_are_called_so() -> None:
    watching = Watching()
    for step in (1, 2):
        for worker in "ab":
            message = snapshot("full", step, running("x", 50, 1), step_s=0.5)
            show(watching.cluster, structs.replace(message, waited_s=0.1), worker_id=worker)
    between = share(watching.group.every_step, StepTotals())
    assert between.idle_share == pytest.approx(0.2)
    assert between.idle_share_source == "measured"
    half = StepTotals(steps=1, worker_steps=2, step_s=1.0, timed_s=2.0, measured_s=1.0)
    assert share(half, StepTotals()).idle_share_source == "both"


def test_engines_that_step_each_by_itself_wait_for_none() -> None:
    watching = Watching()
    for step in range(1, 40):
        for worker, number in (("a", step), ("b", 1000 + 3 * step)):
            load = running(f"{worker}-x", 100 + 50 * (worker == "b"), step)
            message = structs.replace(snapshot("full", step, load, step_s=0.01), step=number)
            show(watching.cluster, message, worker_id=worker)
    measured = total(watching.group)
    assert (measured.together_share, measured.barrier, measured.idle_share) == (0.0, False, None)
    assert "do not step together (0% of the steps" in sentence(measured)
    assert "not known yet" not in sentence(measured)
