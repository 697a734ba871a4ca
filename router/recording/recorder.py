"""Turns what a router sees into recording lines, for any number of listeners."""

from array import array
from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Literal

from msgspec import UNSET, UnsetType

from router.core.energy.joules import PowerLevels
from router.core.request_watcher import Served
from router.core.state.closed_step import ClosedStep
from router.core.state.cluster import Cluster
from router.core.state.group import Group
from router.core.state.worker import Worker
from router.core.types import Outcome, Request
from router.recording import lines
from router.recording.block_numbers import BlockNumbers

# About ten minutes of a group of 64 workers.
ROOM_BYTES = 16 << 20
_LOOK_S = 1.0
# Smaller blocks are numbered several together.
_BLOCK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Setting:
    """Header data besides the workers; see ``Header``."""

    source: Literal["serve", "observe"]
    policy: str | None = None
    dispatch: str | None = None
    power_levels: PowerLevels | None = None


class Listener:
    """Buffer of lines; further ones are dropped and counted."""

    def __init__(self, room_bytes: int = ROOM_BYTES) -> None:
        self._room = room_bytes
        self._lines: list[bytes] = []
        self._bytes = 0
        self._dropped = 0

    def put(self, line: bytes, *, needed: bool = False) -> None:
        """Add a line; ``needed`` ones, which others refer to, are never dropped."""
        if self._bytes + len(line) > self._room and not needed:
            self._dropped += 1
        else:
            self._lines.append(line)
            self._bytes += len(line)

    def take(self) -> bytes:
        if self._dropped:
            self._lines.append(lines.encode(lines.DroppedLine(self._dropped)))
        taken, self._lines = self._lines, []
        self._bytes = self._dropped = 0
        return b"".join(taken)


@dataclass(slots=True)
class _Times:
    dispatched_s: float
    first_byte_s: float | None = None


@dataclass(slots=True)
class _Columns:
    """Workers of a group, in the order of its steps' lists."""

    lockstep: bool
    workers: list[str] = field(default_factory=list)


class Recorder:
    """Makes lines of steps and requests while there are listeners; ``clock``: of the arrivals."""

    def __init__(
        self, cluster: Cluster, setting: Setting, clock: Callable[[], float], started_unix_s: float
    ) -> None:
        self._cluster = cluster
        self._setting = setting
        self._clock = clock
        self._started_unix_s = started_unix_s
        self._started_s = clock()
        self._listeners: list[Listener] = []
        self._times: dict[str, _Times] = {}
        self._blocks = BlockNumbers()
        self._requests = 0
        self._known: dict[str, lines.RecordedWorker] = {}
        self._columns: dict[str, _Columns] = {}
        self._look_s = 0.0

    def listen(self, room_bytes: int = ROOM_BYTES) -> Listener:
        listener = Listener(room_bytes)
        if not self._listeners:
            self._cluster.watchers.append(self)
            for group in self._cluster.groups.values():
                self._watch(group)
        self._look(self._clock())
        setting, levels = self._setting, self._setting.power_levels
        header = lines.Header(
            evenstep=version("evenstep"),
            source=setting.source,
            started_unix_s=self._started_unix_s,
            policy=setting.policy,
            dispatch=setting.dispatch,
            power_levels=None if levels is None else astuple(levels),
            groups={
                name: lines.RecordedGroup(
                    columns.lockstep if setting.source == "serve" else None,
                    tuple(map(self._known.__getitem__, columns.workers)),
                )
                for name, columns in self._columns.items()
            },
        )
        listener.put(lines.encode(header))
        self._listeners.append(listener)
        return listener

    def leave(self, listener: Listener) -> None:
        self._listeners.remove(listener)
        if not self._listeners:
            self._cluster.watchers.remove(self)
            self._times.clear()
            self._blocks = BlockNumbers()
            self._columns.clear()
            for group in self._cluster.groups.values():
                group.watch(None)

    def change(self, setting: Setting) -> None:
        before, self._setting = self._setting, setting
        decided = setting.policy, setting.dispatch
        if decided != (before.policy, before.dispatch):
            self._record(lines.PolicyLine(self.since_start(self._clock()), *decided))

    def since_start(self, time_s: float) -> float:
        return round(time_s - self._started_s, 6)

    def served(
        self,
        group: str,
        worker: str | None,
        tokens: tuple[int, int],
        times_s: tuple[float, float | None, float | None],
        outcome: str,
        slots: int = 1,
        blocks: list[int] | UnsetType = UNSET,
    ) -> None:
        """It ends now; ``tokens``: prompt, output; ``times_s``: arrival, dispatch, first token."""
        arrival_s, *others = times_s
        dispatched_s, first_token_s = (None if t is None else self.since_start(t) for t in others)
        line = lines.RequestLine(
            request=self._requests,
            group=group,
            arrival_s=self.since_start(arrival_s),
            dispatched_s=dispatched_s,
            first_token_s=first_token_s,
            ended_s=self.since_start(self._clock()),
            worker=worker,
            prompt_tokens=tokens[0],
            output_tokens=tokens[1],
            outcome=outcome,
            slots=slots,
            blocks=blocks,
        )
        self._requests += 1
        self._record(line)

    # stages of requests, called by the cluster

    def dispatched(self, request: Request) -> None:
        self._times[request.first_id] = _Times(self._clock())

    def first_byte(self, request: Request, time_s: float) -> None:
        times = self._times.get(request.first_id)
        if times is not None:
            times.first_byte_s = time_s

    def ended(self, request: Request, served: Served | None, outcome: Outcome) -> None:
        times = self._times.pop(request.first_id, None)
        name, prompt, output = served or (None, request.prompt_tokens, 0)
        dispatched_s = None if times is None or served is None else times.dispatched_s
        first_byte_s = None if times is None else times.first_byte_s
        times_s = request.arrival_s, dispatched_s, first_byte_s
        blocks = UNSET if name is None else self._blocks_of(request, name)
        counts = (prompt, output)
        self.served(request.group, name, counts, times_s, outcome.value, request.slots, blocks)

    def _blocks_of(self, request: Request, worker_id: str) -> list[int] | UnsetType:
        prefixes = self._cluster.groups[request.group].prefixes
        block_tokens = prefixes.block_tokens(worker_id)
        if block_tokens is None or request.content is None:
            return UNSET
        together = _together(block_tokens)
        ids = array("Q", prefixes.blocks(worker_id, request))
        return self._blocks.runs(ids[together - 1 :: together])

    # steps and workers

    def joined(self, group: Group) -> None:
        self._watch(group)
        self._look(self._clock())

    def _watch(self, group: Group) -> None:
        self._columns.setdefault(group.name, _Columns(group.lockstep))
        group.watch(partial(self._closed, group))

    def _closed(self, group: Group, closed: ClosedStep) -> None:
        now_s = self._clock()
        if now_s >= self._look_s:
            self._look(now_s)
        time_s = now_s - self._started_s
        workers = self._columns[group.name].workers
        self._record(lines.step_line(group.name, workers, closed, time_s, group.line.waiting))

    def _look(self, now_s: float) -> None:
        self._look_s = now_s + _LOOK_S
        for group in self._cluster.groups.values():
            columns = self._columns[group.name]
            order, changed = columns.workers, columns.lockstep != group.lockstep
            columns.lockstep = group.lockstep
            order += [worker_id for worker_id in group.workers if worker_id not in order]
            for worker in group.workers.values():
                block_tokens = group.prefixes.block_tokens(worker.spec.id)
                known = _described(worker, self._known.get(worker.spec.id), block_tokens)
                if changed or self._known.get(known.id) != known:
                    self._known[known.id] = known
                    reported = known.slots, known.kv_tokens, known.rank
                    line = lines.WorkerLine(
                        known.id, group.name, *reported, group.lockstep, known.block_tokens
                    )
                    self._record(line)

    def _record(self, line: lines.Line) -> None:
        encoded, needed = lines.encode(line), isinstance(line, lines.WorkerLine | lines.PolicyLine)
        for listener in self._listeners:
            listener.put(encoded, needed=needed)


def _together(block_tokens: int) -> int:
    """How many blocks of an engine are numbered as one."""
    return max(1, _BLOCK_TOKENS // block_tokens)


def _described(
    worker: Worker, before: lines.RecordedWorker | None, block_tokens: int | None
) -> lines.RecordedWorker:
    """The worker's current data; its last report holds while it is silent."""
    spec, feed = worker.spec, worker.feed
    slots = before.slots if before else None
    kv_tokens = before.kv_tokens if before else None
    if feed is not None and not feed.full_wanted:
        slots, kv_tokens = feed.slots, feed.kv_tokens or None
    numbered = before.block_tokens if before else None
    if block_tokens is not None:
        numbered = block_tokens * _together(block_tokens)
    return lines.RecordedWorker(spec.id, spec.rank, spec.slots or slots, kv_tokens, numbered)
