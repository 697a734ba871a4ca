"""Laws of the dispatch loop under any order of arrivals, ends, returns, leavings and failures."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from router.core.errors import NoWorkerError, PoolFullError
from router.core.events import WorkerDown, WorkerUp
from router.core.types import Outcome, Request, WorkerSpec
from tests.support.dispatching import Rig, play

WORKERS = {"a": 1, "b": 2, "c": 3}
POOL_LIMIT = 4

STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["submit", "submit", "end", "give_back", "withdraw", "leave", "up", "down", "tick"]
        ),
        st.integers(0, 9),
        st.booleans(),
    ),
    max_size=40,
)


class Story:
    """What has become of each request."""

    def __init__(self) -> None:
        self.rig = Rig(WORKERS, pool_size=POOL_LIMIT)
        self.asked = 0
        self.refused = 0
        self.alive: dict[str, tuple[Request, asyncio.Future[WorkerSpec]]] = {}

    @property
    def free_slots(self) -> int:
        return sum(worker.free_slots for worker in self.rig.group.live_workers())

    def take(self, step: str, number: int) -> None:
        dispatcher = self.rig.dispatcher
        match step:
            case "submit":
                self.submit(slots=1 + number % 3)
            case "up":
                dispatcher.apply(WorkerUp("abc"[number % 3]))
            case "down":
                dispatcher.apply(WorkerDown("abc"[number % 3], "gone"))
            case "tick":
                self.rig.now_s += 1
                dispatcher.tick()
                assert not self.rig.waiting or self.rig.group.live_workers()
            case _ if self.alive:
                self.touch(step, list(self.alive)[number % len(self.alive)])

    def submit(self, slots: int) -> None:
        self.asked += 1
        self.rig.now_s += 1
        try:
            request, waiter = self.rig.submit(self.asked, slots=slots)
        except NoWorkerError:
            self.refused += 1
        except PoolFullError:
            self.refused += 1
            assert self.free_slots == 0
        else:
            self.alive[request.id] = (request, waiter)

    def touch(self, step: str, request_id: str) -> None:
        request, waiter = self.alive[request_id]
        if step == "leave":  # what cancelling the task that awaits it does
            waiter.cancel()
            asyncio.get_running_loop().call_soon(self.rig.dispatcher.end, request, Outcome.ABORTED)
        elif step == "withdraw" or not waiter.done():
            self.rig.dispatcher.end(request, Outcome.ABORTED)
        elif step == "give_back" and waiter.exception() is None:
            again = self.rig.dispatcher.give_back(request)
            self.alive[again[0].id] = again
        else:
            self.rig.dispatcher.end(request, Outcome.COMPLETED)
        del self.alive[request_id]

    def check(self) -> None:
        rig = self.rig
        assert not (rig.waiting and self.free_slots), "a request is held while a slot is free"
        waiting = [waiter for _, waiter in self.alive.values() if not waiter.done()]
        failed = [w for _, w in self.alive.values() if w.done() and w.exception() is not None]
        assert rig.waiting == len(waiting)
        assert rig.in_flight == len(self.alive) - len(waiting) - len(failed)
        ended = sum(rig.stats.outcomes.values())
        assert self.asked == self.refused + rig.waiting + rig.in_flight + ended

    def finish(self) -> None:
        for request_id in list(self.alive):
            self.touch("end", request_id)
        assert (self.rig.waiting, self.rig.in_flight) == (0, 0)
        assert all(worker.free_slots == worker.slots for worker in self.rig.group.workers.values())


@given(STEPS)
def test_no_request_is_lost_or_held_back(steps: list[tuple[str, int, bool]]) -> None:
    play(Story, steps)
