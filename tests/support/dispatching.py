"""A dispatcher on a clock that stands still until a test moves it."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from router.config.serve_settings import ServeSettings
from router.core.events import SnapshotReceived, WorkerUp
from router.core.policies.baselines import PerRequest, fcfs
from router.core.policies.policy_protocol import Policy
from router.core.state.cluster import Cluster
from router.core.types import Request, WorkerSpec
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.group_queue import DispatchSettings
from router.dispatch.interface import Deciding
from tests.support.core import request, snapshot


def dispatch_settings(**settings: Any) -> DispatchSettings:
    """The defaults of ``evenstep serve``, without over-commit, but for these settings."""
    return replace(ServeSettings().of(DispatchSettings), **{"overcommit": 0, **settings})


class Rig:
    """A dispatcher, its workers up, and what tests do to it.

    Args:
        slots: per worker, by name; 0 where snapshots tell them.
        policy: asked first; without it requests go to the first free worker.
        settings: of ``DispatchSettings``.
    """

    def __init__(self, slots: Mapping[str, int], policy: Policy | None = None, **settings: Any):
        self.now_s = 100.0
        specs = [WorkerSpec(i, f"http://{i}", slots=count or None) for i, count in slots.items()]
        self.dispatcher = Dispatcher(
            Cluster(specs),
            Deciding(lambda: policy or PerRequest(fcfs), lambda: PerRequest(fcfs)),
            dispatch_settings(**settings),
            lambda: self.now_s,
        )
        for spec in specs:
            self.dispatcher.apply(WorkerUp(spec.id))

    @property
    def cluster(self) -> Cluster:
        return self.dispatcher.cluster

    @property
    def group(self) -> Any:
        return self.cluster.groups["default"]

    @property
    def stats(self) -> Any:
        return self.dispatcher.deciders["default"].stats

    @property
    def waiting(self) -> int:
        size = len(self.dispatcher.deciders["default"].pool)
        assert size == self.group.line.waiting, "pool and cluster count differently"
        return size

    @property
    def in_flight(self) -> int:
        return sum(worker.in_flight for worker in self.group.workers.values())

    def submit(self, number: int, **fields: Any) -> tuple[Request, asyncio.Future[WorkerSpec]]:
        asking = request(number, arrival=self.now_s, **fields)
        return asking, self.dispatcher.submit(asking)

    def report(self, worker: str, sequence: int, *running: Any, **fields: Any) -> None:
        """A worker's full snapshot arrives."""
        told = snapshot("full", sequence, *running, **fields)
        self.dispatcher.apply(SnapshotReceived(worker, told, self.now_s))


async def settle() -> None:
    """Let everything run that is due now."""
    for _ in range(4):
        await asyncio.sleep(0)


def sent_to(waiter: asyncio.Future[WorkerSpec]) -> str | None:
    """The worker that a request was assigned to, if it was."""
    return waiter.result().id if waiter.done() else None


class Story(Protocol):
    """Requests and what becomes of them, a step at a time."""

    def take(self, step: str, number: int) -> None:
        """Let something happen."""

    def check(self) -> None:
        """See that all is as it has to be, once nothing is under way."""

    def finish(self) -> None:
        """End what is left."""


AnyStory = TypeVar("AnyStory", bound=Story)


def play(begin: Callable[[], AnyStory], steps: Iterable[tuple[str, int, bool]]) -> AnyStory:
    """Play a story to its end; what the event loop would complain of is an error.

    Args:
        begin: called on the event loop.
        steps: what happens, and whether all settles before the next.
    """
    complaints: list[object] = []

    async def run() -> AnyStory:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what))
        story = begin()
        for step, number, pause in steps:
            story.take(step, number)
            if pause:
                await settle()
                story.check()
        await settle()
        story.check()
        story.finish()
        return story

    story = asyncio.run(run())
    assert not complaints
    return story
