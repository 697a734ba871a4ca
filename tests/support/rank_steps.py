"""Steps of real engines, and barrier steps of a data-parallel group, from their own snapshots."""

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import zmq

from router.core.state.feed import Feed
from router.core.types import Snapshot
from router.core.wire import decode
from tests.support.server import Server, wait_until

_POLL_MS = 100
_REST_S = 120


@dataclass(frozen=True, slots=True)
class RankStep:
    """A rank's part in a barrier step in which it computed something.

    Attributes:
        time_s: when it ended, in seconds since 1970.
        step_s: how long it took.
        load_tokens: KV tokens resident in it.
        running: requests that took part in it.
        entered: those whose first step it was.
        tokens: what it computed.
        power_w: of its GPUs; None where there are none.
        prompt_tokens: those of them that prompts had.
        prompt_context: each of these times the tokens before it, summed.
    """

    time_s: float
    step_s: float
    load_tokens: int
    running: int
    entered: int
    tokens: int
    power_w: float | None = None
    prompt_tokens: int = 0
    prompt_context: float = 0.0


Ranks = Sequence[Mapping[int, RankStep]]
"""For every rank, its steps by their number among the barrier's."""


class SnapshotLog:
    """Every snapshot of some ranks from the moment that all of them have been heard."""

    def __init__(self, ranks: int) -> None:
        self.snapshots: list[list[Snapshot]] = [[] for _ in range(ranks)]

    @property
    def heard(self) -> bool:
        return all(self.snapshots)

    def rest(self, ended: int) -> None:
        """Wait until so many requests have ended since the reading began, and none is left."""

        def resting() -> bool:
            last = [told[-1] for told in self.snapshots]
            return self.ended >= ended and not any(
                one.step_s or one.waiting or one.kv_groups[0].blocks_used for one in last
            )

        wait_until(resting, _REST_S, f"{ended} requests have ended and the engines rest")

    @property
    def ended(self) -> int:
        """Requests since the reading began."""
        return sum(len(one.finished) for told in self.snapshots for one in told)

    def drop(self) -> None:
        """Forget what resting ranks have told, but for their last words."""
        for told in self.snapshots:
            del told[:-1]

    def ranks(self) -> Ranks:
        """What the snapshots say; those that began while something ran are refused."""
        return [rank_steps(list(told)) for told in self.snapshots]

    def read(self, endpoints: Sequence[str], stop: threading.Event) -> None:
        """Read until told to stop."""
        with zmq.Context() as context:
            sockets = []
            poller = zmq.Poller()
            for endpoint in endpoints:
                socket = context.socket(zmq.SUB)
                socket.setsockopt(zmq.SUBSCRIBE, b"")
                socket.setsockopt(zmq.RCVHWM, 0)
                socket.setsockopt(zmq.LINGER, 0)
                socket.connect(endpoint)
                poller.register(socket, zmq.POLLIN)
                sockets.append(socket)
            while not stop.is_set():
                ready = dict(poller.poll(_POLL_MS))
                for rank, socket in enumerate(sockets):
                    if socket in ready:
                        self.snapshots[rank].append(decode(socket.recv()))
            for socket in sockets:
                socket.close()


@contextlib.contextmanager
def reading(endpoints: Sequence[str]) -> Iterator[SnapshotLog]:
    """Read the streams of resting ranks in a thread until the block ends."""
    log, stop = SnapshotLog(len(endpoints)), threading.Event()
    reader = threading.Thread(target=log.read, args=(endpoints, stop))
    reader.start()
    try:
        wait_until(lambda: log.heard, _REST_S, "all streams")
        yield log
    finally:
        stop.set()
        reader.join()


def rank_steps(snapshots: Sequence[Snapshot]) -> dict[int, RankStep]:
    """One rank's steps; it must have been at rest when the first snapshot came.

    Raises:
        ValueError: a snapshot is missing, or a step is told of twice.
    """
    feed = Feed()
    steps: dict[int, RankStep] = {}
    for before, snapshot in zip([None, *snapshots], snapshots, strict=False):
        if before is not None and snapshot.sequence > before.sequence + 1:
            raise ValueError(f"snapshot {before.sequence + 1} is missing")
        feed.apply(snapshot, snapshot.time_s)
        tokens = snapshot.scheduled_prefill_tokens + snapshot.scheduled_decode_tokens
        # A heartbeat repeats the last step, without what it computed.
        if snapshot.kind == "full" or tokens == 0:
            continue
        if snapshot.step in steps:
            raise ValueError(f"step {snapshot.step} is told of twice")
        steps[snapshot.step] = RankStep(
            snapshot.time_s,
            snapshot.step_s,
            feed.step_load_tokens,
            feed.step_running,
            feed.step_entered,
            tokens,
            snapshot.power_w,
            snapshot.scheduled_prefill_tokens,
            feed.step_prompt_context,
        )
    return steps


@dataclass(frozen=True, slots=True)
class GroupFigures:
    """Averages over barrier steps.

    Attributes:
        steps: how many.
        imbalance_tokens: G max L - sum L, ranks with nothing to compute as 0.
        mean_load_tokens: of a rank.
        max_load_tokens: of the fullest rank.
        slot_bubble_steps: steps that slots stood empty, for each request that entered one.
        step_mean_s: of the ranks that computed something.
    """

    steps: int
    imbalance_tokens: float
    mean_load_tokens: float
    max_load_tokens: float
    slot_bubble_steps: float
    step_mean_s: float


def group_figures(ranks: Ranks, slots: int, begin_s: float, end_s: float) -> GroupFigures:
    """Averages over the steps that ended in a window in which requests always waited.

    Args:
        ranks: of one group.
        slots: of each rank.
        begin_s: of the window, seconds since 1970.
        end_s: likewise.

    Raises:
        ValueError: no step ended in it.
    """
    numbers = sorted(
        number
        for number in {number for steps in ranks for number in steps}
        if begin_s <= max(s[number].time_s for s in ranks if number in s) <= end_s
    )
    if not numbers:
        raise ValueError("no step ended in the window")
    parts = [[steps.get(number) for steps in ranks] for number in numbers]
    loads = [[part.load_tokens if part else 0 for part in step] for step in parts]
    free = sum(slots - (part.running if part else 0) for step in parts for part in step)
    entered = sum(part.entered for step in parts for part in step if part)
    return GroupFigures(
        steps=len(numbers),
        imbalance_tokens=fmean(len(step) * max(step) - sum(step) for step in loads),
        mean_load_tokens=fmean(fmean(step) for step in loads),
        max_load_tokens=fmean(max(step) for step in loads),
        slot_bubble_steps=free / max(1, entered),
        step_mean_s=fmean(part.step_s for step in parts for part in step if part),
    )


def knows_prompts(router: Server) -> bool:
    """Whether steps have taught a router what a prompt token costs."""
    lines = router.get("/metrics").text.splitlines()
    costs = (line for line in lines if line.startswith("evenstep_step_cost_seconds{"))
    return any('term="prompt_token"' in line for line in costs)
