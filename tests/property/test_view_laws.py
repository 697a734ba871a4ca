"""A worker's view that is kept is the one that would be made anew, whatever has happened.

The cluster's own machine goes on, and besides gauges arrive, breakers open, rest and close, time
passes and plans of service rates change.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from router.core.events import EngineFailed, Event, GaugesReceived, WorkerUp
from router.core.state.foreign_load import Gauges
from router.core.types import Dispatch, WorkerSpec, WorkerView
from tests.property.test_cluster_machine import SLOTS, WORKERS, ClusterMachine

ANY = st.sampled_from(WORKERS)


class ViewMachine(ClusterMachine):
    """See above."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.views_for: tuple[Dispatch, int] = Dispatch.POOL, 0
        self.noted: tuple[int | None, tuple[Dispatch, int], Sequence[WorkerView]] | None = None
        self.apply = self.cluster.apply
        self.cluster.apply = self.apply_now  # type: ignore[method-assign]

    def apply_now(self, event: Event) -> bool:
        timed = msgspec.structs.replace(event, time_s=self.now_s) if timely(event) else event
        return self.apply(timed)

    @initialize(dispatch=st.sampled_from(Dispatch), overcommit=st.integers(0, 2))
    def choose(self, dispatch: Dispatch, overcommit: int) -> None:
        self.views_for = dispatch, overcommit

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0, 30.0]), reviewed=st.booleans())
    def time_passes(self, seconds: float, reviewed: bool) -> None:
        self.now_s += seconds
        if reviewed:
            self.cluster.groups["default"].review(self.now_s)

    @rule(worker=ANY, running=st.integers(0, 9), waiting=st.integers(0, 2), read=st.booleans())
    def gauges_arrive(self, worker: str, running: int, waiting: int, read: bool) -> None:
        if worker in self.there:
            gauges = Gauges(running, waiting, 0.5, 2000) if read else None
            self.cluster.apply(GaugesReceived(worker, gauges, self.now_s))

    @rule(worker=ANY, times=st.integers(1, 6), attempt=st.integers(0, 5))
    def fail(self, worker: str, times: int, attempt: int) -> None:
        for _ in range(times if worker in self.there else 0):
            group = self.cluster.groups["default"]
            group.failed(worker, str(attempt), self.now_s, suspect=False)

    @rule(worker=ANY, attempt=st.integers(0, 5))
    def succeed(self, worker: str, attempt: int) -> None:
        if worker in self.there:
            self.cluster.worker(worker).breaker.succeeded(str(attempt), self.now_s)

    @rule(worker=ANY)
    def rest(self, worker: str) -> None:
        if worker in self.there:
            self.cluster.groups["default"].watched(worker).rest(self.now_s, 2.0)

    @rule(worker=ANY)
    def restart_of_the_engine(self, worker: str) -> None:
        if worker in self.there:
            self.cluster.apply(EngineFailed(worker))
            self.cluster.apply(WorkerUp(worker))
            self.cluster.groups["default"].watched(worker).rose(self.now_s)

    @rule(worker=ANY, slots=st.integers(1, SLOTS), rate=st.sampled_from([None, 0.5, 2.0]))
    def amend(self, worker: str, slots: int, rate: float | None) -> None:
        if worker in self.there:
            self.cluster.amend(WorkerSpec(worker, "", slots=slots, service_rate=rate))

    @invariant()
    def a_kept_view_is_as_one_made_anew(self) -> None:
        group = self.cluster.groups["default"]
        kept = group.views(*self.views_for)
        seen = group.version, self.views_for
        if self.noted is not None and group.version is not None and seen == self.noted[:2]:
            assert kept == self.noted[2], "their version says that they have not changed"
        assert all(a is b for a, b in zip(kept, group.views(*self.views_for), strict=True)) or any(
            worker.draining or not worker.breaker.calm for worker in group.live_workers()
        )
        for worker in group.live_workers():
            worker.amend(worker.spec)  # forgets the view
        assert kept == group.views(*self.views_for)
        self.noted = group.version, self.views_for, kept

    # Not here: breakers hold back, engines change their slots, and others have requests.

    def those_who_are_there_are_listed_and_who_is_drained_is_given_none(self) -> None: ...

    def no_figure_is_negative(self) -> None: ...

    def teardown(self) -> None: ...


def timely(event: Any) -> bool:
    return hasattr(event, "time_s")


TestViews = ViewMachine.TestCase
TestViews.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
