"""The same laws while workers are added, drained and removed as well, in any order."""

from hypothesis import given
from hypothesis import strategies as st

from router.core.errors import ConfigError
from router.core.events import WorkerDown, WorkerUp
from router.dispatch.membership import UnknownWorkerError
from tests.property.test_dispatch_laws import POOL_LIMIT, WORKERS, Story
from tests.support.dispatching import play
from tests.support.managed import Managed, worker

OF_REQUESTS = ["submit", "submit", "submit", "end", "end", "give_back", "withdraw", "leave", "tick"]
OF_WORKERS = [
    "up",
    "down",
    "add",
    "drain",
    "undrain",
    "remove",
    "fade",
    "force",
    "settle",
]
STEPS = st.lists(
    st.tuples(st.sampled_from(OF_REQUESTS + OF_WORKERS), st.integers(0, 9), st.booleans()),
    max_size=50,
)


class FleetStory(Story):
    """What has become of each request, and of each worker."""

    def __init__(self) -> None:
        super().__init__()
        self.rig: Managed = Managed(WORKERS, pool_size=POOL_LIMIT)

    @property
    def free_slots(self) -> int:
        taking = [one for one in self.rig.group.workers.values() if one.takes]
        return sum(one.free_slots for one in taking)

    def take(self, step: str, number: int) -> None:
        if step not in OF_WORKERS and step != "tick":
            super().take(step, number)
            return
        try:
            self.change(step, "abc"[number % 3], slots=1 + number % 3)
        except UnknownWorkerError:
            assert "abc"[number % 3] not in self.rig.states
        except ConfigError:
            assert step in ("add", "remove")

    def change(self, step: str, name: str, slots: int) -> None:
        rig, fleet = self.rig, self.rig.fleet
        match step:
            case "up" | "down" if name in rig.group.workers:
                news = WorkerUp(name) if step == "up" else WorkerDown(name, "gone")
                rig.dispatcher.apply(news)
            case "tick":
                rig.now_s += 1
                rig.dispatcher.tick()
                assert not rig.waiting or rig.group.serving
            case "add":
                fleet.add(worker(name, slots=slots))
            case "drain" | "undrain":
                fleet.drain(name, draining=step == "drain")
            case "remove" | "fade" | "force":
                fleet.remove(name, drain=step == "fade", force=step == "force")
            case "settle":
                fleet.settle()

    def check(self) -> None:
        super().check()
        rig = self.rig
        there = {one.spec.id for one in rig.fleet.members if one.state != "joining"}
        assert there == set(rig.group.workers)
        assert rig.dispatcher.deciders["default"].group is rig.group

    def finish(self) -> None:
        super().finish()
        self.rig.fleet.settle()
        assert not {"leaving", "joining", "draining"} & set(self.rig.states.values())
        assert set(self.rig.states) == set(self.rig.group.workers)


@given(STEPS)
def test_no_request_is_lost_or_held_back_whoever_comes_and_goes(
    steps: list[tuple[str, int, bool]],
) -> None:
    play(FleetStory, steps)
