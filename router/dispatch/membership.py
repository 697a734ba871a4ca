"""The workers of a running router: join, drain, leave.

``settle`` moves the fleet to the wanted workers. An unwanted worker drains, then leaves. A
newcomer waits while its id or endpoint is taken.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from router.core.errors import ConfigError
from router.core.state.cluster import Cluster, in_order
from router.core.state.worker import Worker
from router.core.types import DEFAULT_SLOTS, WorkerSpec
from router.core.worker_specs import check_workers
from router.dispatch.dispatcher import Dispatcher

log = logging.getLogger(__name__)

_LOOK_S = 0.1


class Follower(Protocol):
    """Tracks the workers; a ConfigError of ``join`` rejects a worker."""

    def join(self, spec: WorkerSpec) -> None: ...

    def leave(self, worker_id: str) -> None: ...


class UnknownWorkerError(ConfigError):
    """No worker has this id."""


class BusyError(ConfigError):
    """The state of a worker forbids the change now."""


@dataclass(frozen=True, slots=True)
class Member:
    """A worker as its operator sees it.

    ``state``: ``up``, ``down``, ``draining``, ``drained`` (and empty), ``leaving`` (once empty) or
    ``joining`` (once another has left). ``worker``: None until it has joined.
    """

    spec: WorkerSpec
    state: str
    worker: Worker | None = None


class Fleet:
    """Adds, drains and removes workers; all runs on the dispatcher's event loop.

    Args:
        followers: updated after the dispatcher; in reverse on leaving.
        break_off: callback (worker id, reason) that ends a worker's attempts.
        configured: initial workers, already known to all.
    """

    def __init__(
        self,
        cluster: Cluster,
        dispatcher: Dispatcher,
        followers: Sequence[Follower],
        break_off: Callable[[str, str], None],
        configured: Iterable[WorkerSpec],
    ) -> None:
        self._cluster = cluster
        self._dispatcher = dispatcher
        self.followers = list(followers)
        self._break_off = break_off
        self._there = {spec.id: spec for spec in configured}
        self._wanted = dict(self._there)
        self._configured: Mapping[str, WorkerSpec] = dict(self._there)
        self._drained: dict[str, bool] = {}
        self._forced: set[str] = set()
        self._refused: dict[str, ConfigError] = {}
        self._unsettled = asyncio.Event()
        _warn_of_slots(self._there.values())

    @property
    def members(self) -> list[Member]:
        workers = map(self._cluster.worker, self._there)
        there = [Member(worker.spec, self._state(worker), worker) for worker in workers]
        coming = [s for i, s in self._wanted.items() if self._there.get(i) != s]
        return there + [Member(spec, "joining") for spec in coming]

    def add(self, spec: WorkerSpec) -> None:
        """A worker that is leaving with the same spec stays; BusyError: another one has its id."""
        if self._wanted.get(spec.id, spec) != spec:
            raise BusyError(f"there is a worker {spec.id!r} already; remove it first")
        self._want({**self._wanted, spec.id: spec})
        if spec.id in self._refused:
            raise self._refused.pop(spec.id)

    def remove(self, worker_id: str, *, drain: bool = False, force: bool = False) -> list[str]:
        """Remove a worker and its lockstep partners; return their ids.

        ``drain``: its requests may finish first. ``force``: unanswered requests restart elsewhere,
        streams break off. With neither, BusyError if it has requests.
        """
        going = self._together(worker_id)
        busy = [i for i in going if i in self._there and not self._cluster.worker(i).empty]
        if busy and not (drain or force):
            raise BusyError(f"{', '.join(busy)}: requests are under way; drain, or force")
        self._forced |= set(going) if force else set()
        self._want({i: spec for i, spec in self._wanted.items() if i not in going})
        return going

    def drain(self, worker_id: str, *, draining: bool = True) -> list[str]:
        """Start or end draining a worker and its lockstep partners; return their ids."""
        concerned = [i for i in self._together(worker_id) if i in self._there]
        for each in concerned:
            if draining:
                self._drained.setdefault(each, False)
            else:
                self._drained.pop(each, None)
        log.info("%s: %s", ", ".join(concerned), "draining" if draining else "drained no more")
        self.settle()
        return concerned

    def change(self, configured: Iterable[WorkerSpec], lockstep: Collection[str]) -> None:
        """Apply what differs from the last configuration; errors as from ``check``."""
        configured = tuple(configured)
        wanted = self.check(configured)
        self._configured = {spec.id: spec for spec in configured}
        self._dispatcher.set_lockstep(lockstep)
        self._want(wanted)

    def check(self, configured: Iterable[WorkerSpec]) -> dict[str, WorkerSpec]:
        """The wanted workers by id; raises ConfigError if they conflict."""
        after = {spec.id: spec for spec in configured}
        gone = self._configured.keys() - after.keys()
        wanted = {i: spec for i, spec in self._wanted.items() if i not in gone}
        wanted |= {i: spec for i, spec in after.items() if self._configured.get(i) != spec}
        check_workers(tuple(wanted.values()))
        return wanted

    async def run(self) -> None:
        while True:
            await self._unsettled.wait()
            try:
                self.settle()
            except Exception:
                log.exception("seeing to the workers failed")
            await asyncio.sleep(_LOOK_S)

    async def empty(self, worker_ids: Iterable[str], longest_s: float) -> bool:
        """Wait for these workers' requests to end; false after ``longest_s``."""
        worker_ids = set(worker_ids)
        end_s = asyncio.get_running_loop().time() + longest_s
        while any(not self._cluster.worker(i).empty for i in self._there.keys() & worker_ids):
            if asyncio.get_running_loop().time() >= end_s:
                return False
            await asyncio.sleep(min(_LOOK_S, longest_s))
        return True

    def settle(self) -> None:
        for spec in list(self._there.values()):
            self._settle(spec, self._wanted.get(spec.id))
        for spec in in_order(self._wanted.values()):
            taken = {other.snapshots for other in self._there.values()} - {None}
            # A prefill worker waits for its decode group.
            alone = spec.role == "prefill" and spec.group not in self._cluster.groups
            if spec.id not in self._there and not alone and spec.snapshots not in taken:
                self._come(spec)
        # What is wanted, but not there, waits; what is drained, but not empty, is waited for.
        if self._wanted != self._there or not all(self._drained.values()):
            self._unsettled.set()
        else:
            self._unsettled.clear()

    def _want(self, wanted: dict[str, WorkerSpec]) -> None:
        check_workers(tuple(wanted.values()))
        self._refused.clear()
        self._wanted = wanted
        self.settle()

    def _settle(self, spec: WorkerSpec, wanted: WorkerSpec | None) -> None:
        if wanted is not None and wanted != spec and _place(wanted) == _place(spec):
            self._amend(wanted)
        leaving, worker = self._leaving(spec.id), self._cluster.worker(spec.id)
        self._forced -= set() if leaving else {spec.id}
        if worker.draining != (leaving or spec.id in self._drained):
            self._dispatcher.drain(spec.id, draining=not worker.draining)
        if leaving and spec.id in self._forced and not worker.empty:
            self._break_off(spec.id, "the worker is being removed")
        if leaving and worker.empty:
            self._go(spec.id)
        elif worker.empty and self._drained.get(spec.id) is False:
            self._drained[spec.id] = True
            log.info("%s: drained; nothing is left on it", spec.id)

    def _come(self, spec: WorkerSpec) -> None:
        told: list[Follower] = []
        try:
            self._dispatcher.join(spec)
            self._there[spec.id] = spec
            for follower in self.followers:
                follower.join(spec)
                told.append(follower)
        except ConfigError as error:
            log.error("worker %s does not join: %s", spec.id, error)  # noqa: TRY400 - says it all
            self._refused[spec.id] = error
            del self._wanted[spec.id]
            if spec.id in self._there:
                self._go(spec.id, told)
        else:
            log.info("worker %s has joined group %s: %s", spec.id, spec.group, spec.url)
            _warn_of_slots([spec])

    def _go(self, worker_id: str, followers: Sequence[Follower] | None = None) -> None:
        self._dispatcher.leave(worker_id)
        for follower in reversed(self.followers if followers is None else followers):
            follower.leave(worker_id)
        del self._there[worker_id]
        self._drained.pop(worker_id, None)
        self._forced.discard(worker_id)
        log.info("worker %s has left", worker_id)

    def _amend(self, spec: WorkerSpec) -> None:
        self._there[spec.id] = spec
        self._dispatcher.amend(spec)
        for follower in self.followers:
            follower.leave(spec.id)
            try:
                follower.join(spec)
            except ConfigError as error:
                log.error("worker %s: %s", spec.id, error)  # noqa: TRY400 - says it all
        log.info("worker %s: settings changed", spec.id)
        _warn_of_slots([spec])

    def _leaving(self, worker_id: str) -> bool:
        return self._wanted.get(worker_id) != self._there[worker_id]

    def _together(self, worker_id: str) -> list[str]:
        if worker_id not in self._there:
            if worker_id in self._wanted:
                return [worker_id]
            raise UnknownWorkerError(f"no worker is called {worker_id!r}")
        group = self._cluster.group_of(worker_id)
        return list(group.workers) if group.lockstep else [worker_id]

    def _state(self, worker: Worker) -> str:
        if self._leaving(worker.spec.id):
            return "leaving"
        if worker.draining:
            return "drained" if worker.empty else "draining"
        return "up" if worker.live else "down"


def _place(spec: WorkerSpec) -> tuple[object, ...]:
    return spec.id, spec.url, spec.rank, spec.group, spec.role


def _warn_of_slots(specs: Iterable[WorkerSpec]) -> None:
    guessed = [spec.id for spec in specs if spec.slots is None and spec.snapshots is None]
    if guessed:
        log.warning(
            "%s: nobody says how many requests run at once, %d are assumed for each: give slots=N, "
            "the engine's --max-num-seqs, or snapshots=ENDPOINT of the plug-in",
            ", ".join(guessed),
            DEFAULT_SLOTS,
        )
