"""``evenstep observe``: measures the barrier's cost while another router balances.

It only reads the snapshots of the engines' plug-in. No request passes through it.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from router.access.key_files import key_source, warn_of_readers
from router.admin.admin_port import AddRoutes, create_admin, serving
from router.admin.facts import Footing
from router.admin.operator_routes import add_health, add_recording
from router.admin.page_state import Status
from router.admin.status_page import Streams, add_page
from router.api.shared_routes import add_metrics
from router.config.serve_settings import ServeSettings
from router.core.events import SnapshotReceived, WorkerDown, WorkerUp
from router.core.state.barrier import StepTotals
from router.core.state.cluster import Cluster
from router.core.state.group import Group
from router.engines.power_agents import PowerAgents
from router.engines.snapshots import SnapshotClient
from router.metrics.render import Metrics
from router.metrics.workers import AGENT_ROWS, SNAPSHOT_ROWS
from router.observe.observed import Seen, SeenRequests, Share, share, total
from router.recording.record_file import RecordFile
from router.recording.recorder import Recorder, Setting

log = logging.getLogger(__name__)

_TICK_S = 0.25

Say = Callable[[str, Share], None]


class Observer:
    """Receives the snapshots of all workers and sums up their steps."""

    def __init__(self, settings: ServeSettings) -> None:
        levels, keys = settings.levels, settings.keys
        warn_of_readers(settings.secret_files)
        self._admin_keys = key_source(settings.admin_key_file)
        self.requests = 0
        # Without lockstep: one silent worker must not take the others down.
        alone = [f"{worker.group}=no" for worker in settings.workers]
        self.cluster = Cluster(
            settings.workers, alone, power_levels=levels, step_time=settings.fixed_step_time
        )
        self._stale_s = settings.snapshot_stale_s
        self._calibrated = levels is not None
        self.recorder = Recorder(
            self.cluster, Setting("observe", power_levels=levels), time.monotonic, time.time()
        )
        self._seen = {
            name: SeenRequests(group, partial(self._ended, name))
            for name, group in self.groups.items()
        }
        self._snapshots = SnapshotClient(
            settings.workers,
            self.apply,
            lambda worker_id: self.cluster.worker(worker_id).full_wanted,
            time.monotonic,
            keys,
        )
        self._agents = PowerAgents(settings.workers, self.cluster.apply, time.monotonic, keys)
        self._files = [RecordFile(Path(settings.record), self.recorder)] if settings.record else []

    @property
    def groups(self) -> dict[str, Group]:
        """Groups with a possible barrier; prefill workers step independently."""
        return {group.name: group for group in self.cluster.answering}

    async def run(
        self, stopped: asyncio.Event, every_s: float, say: Say, admin: socket.socket | None = None
    ) -> None:
        """Every ``every_s`` seconds ``say`` a measurement of each group, until ``stopped``."""
        self._snapshots.start()
        streams = Streams()
        app = create_admin(self._routes(streams), self._admin_keys)
        async with asyncio.TaskGroup() as tasks, serving(app, streams, admin):
            parts = (self._agents.run(), self._watch(), self._say(every_s, say))
            files = (file.run() for file in self._files)
            running = [tasks.create_task(part) for part in (*parts, *files)]
            await stopped.wait()
            for seen in self._seen.values():
                seen.end()
            for task in running:
                task.cancel()
        self._snapshots.close()

    def apply(self, event: SnapshotReceived) -> None:
        """A snapshot also proves its worker alive."""
        worker, group = self.cluster.worker(event.worker_id), self.cluster.group_of(event.worker_id)
        if not worker.live and event.snapshot.kind != "stateless":
            self.cluster.apply(WorkerUp(event.worker_id))
        self.cluster.apply(event)
        seen, snapshot = self._seen.get(group.name), event.snapshot
        if seen is None:
            group.departures.clear()
        elif worker.feed is not None and worker.feed.sequence == snapshot.sequence:
            seen.look(event.worker_id, snapshot, event.received_s)

    def tick(self) -> None:
        now_s = time.monotonic()
        for group in self.cluster.groups.values():
            for worker in group.live_workers():
                if worker.feed is None or now_s - worker.feed.received_s > self._stale_s:
                    reason = f"no snapshot for {self._stale_s:g} s"
                    log.warning("%s: %s", worker.spec.id, reason)
                    self.cluster.apply(WorkerDown(worker.spec.id, reason))
                    if group.name in self._seen:
                        self._seen[group.name].lose(worker.spec.id)

    def _ended(self, group: str, seen: Seen) -> None:
        self.requests += 1
        self.recorder.served(
            group,
            seen.worker_id,
            (seen.prompt_tokens, seen.output_tokens),
            (seen.first_s, None, seen.first_token_s),
            "completed" if seen.complete else "lost",
        )

    async def _watch(self) -> None:
        while True:
            self.tick()
            await asyncio.sleep(_TICK_S)

    async def _say(self, every_s: float, say: Say) -> None:
        before = {name: StepTotals() for name in self.groups}
        while True:
            await asyncio.sleep(every_s)
            for name, group in self.groups.items():
                now = group.every_step
                say(name, share(now, before[name]))
                before[name] = now

    def _routes(self, streams: Streams) -> list[AddRoutes]:
        problem, clock = self._snapshots.problem, time.monotonic
        counters = ((SNAPSHOT_ROWS, self._snapshots), (AGENT_ROWS, self._agents))
        metrics = Metrics(self.cluster, clock, counters)
        status = Status(self.cluster, clock, problem=problem)
        footing = Footing(calibrated=self._calibrated)

        def page() -> bytes:
            return msgspec.json.encode(status.read(footing))

        return [
            partial(add_metrics, render=metrics.render),
            partial(add_health, cluster=self.cluster, problem=problem),
            partial(add_page, render=page, streams=streams),
            partial(add_recording, recorder=self.recorder, streams=streams),
        ]


def group_report(group: Group) -> dict[str, Any]:
    """A group's steps so far; None: not known."""
    measured, joules = total(group), group.energy.joules
    return {
        "workers": len(group.workers),
        "workers_up": len(group.live_workers()),
        **asdict(measured),
        "barrier": measured.barrier,
        "idle_share_source": measured.idle_share_source,
        "step_time": None if group.fitted is None else asdict(group.fitted),
        "useful_j": joules.useful_j,
        "waiting_j": joules.waiting_j,
        "idle_j": joules.idle_j,
        "undivided_j": joules.unknown_j,
    }
