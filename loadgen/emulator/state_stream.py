"""State stream of one emulated worker, on the running event loop."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Hashable, Sequence
from typing import cast

from engine_patches.stream.cached_blocks import CachedBlocks, is_told
from engine_patches.stream.prompt_leases import PromptLeases
from engine_patches.stream.publisher import SnapshotPublisher, StepReport
from loadgen.emulator.binding import bound
from loadgen.engine.engine_state import IDLE, state_of
from loadgen.engine.prefix_cache import Cleared, Removed, Stored
from loadgen.engine.request import EngineRequest
from loadgen.engine.stepping import WorkerModel, WorkerStep
from router.core.step_time import StepBudget
from router.core.wire import request_token


class StateStream:
    """Publishes the state of a worker's engine; a restarted stream is a new epoch.

    Without an endpoint it publishes nothing.
    """

    def __init__(
        self, endpoint: str | None, *, group: str, worker: str, rank: int, ranks: int = 0
    ) -> None:
        self._endpoint = endpoint
        self._group = group
        self._worker = worker
        self._rank = rank
        self._ranks = ranks
        self._publisher: SnapshotPublisher | None = None
        self._silent = False
        # A snapshot's ``wave`` and ``wave_step``.
        self.shared = 0, 0
        self._cached = CachedBlocks(0)
        self._leases = PromptLeases()

    async def start(self, model: WorkerModel) -> None:
        """Bind both endpoints, as a new epoch."""
        if (endpoint := self._endpoint) is None:
            return
        initial = _report(model, 0)
        self._cached = CachedBlocks(_told_block(model))
        self._leases = PromptLeases()
        self._publisher = await bound(
            lambda: SnapshotPublisher(
                endpoint,
                group=self._group,
                worker=self._worker,
                rank=self._rank,
                ranks=self._ranks,
                initial=initial,
                cached=self._cached,
                leases=self._leases,
            ),
            f"cannot publish snapshots at {endpoint}",
        )
        self.resume()

    def stop(self) -> None:
        if self._publisher is not None:
            self.silence()
            self._publisher.close()
            self._publisher = None

    def silence(self) -> None:
        """Send and answer nothing until ``resume``."""
        if self._publisher is not None and not self._silent:
            asyncio.get_running_loop().remove_reader(self._publisher.request_fd)
        self._silent = True

    def resume(self) -> None:
        """Answer again; no-op when the stream is stopped."""
        self._silent = False
        if self._publisher is not None:
            loop = asyncio.get_running_loop()
            loop.add_reader(self._publisher.request_fd, self._publisher.poll)
            self._publisher.poll()

    @property
    def told_prompt_budget(self) -> StepBudget:
        """By routers, now."""
        return self._leases.least(time.time())

    def beat(self) -> None:
        if self._publisher is not None and not self._silent:
            self._publisher.poll()

    def note_cache(self, events: Sequence[Stored | Removed | Cleared]) -> None:
        """For the next message."""
        if not self._cached.block_tokens:
            return
        for event in events:
            if isinstance(event, Stored):
                self._cached.stored(_numbers(event.ids))
            elif isinstance(event, Removed):
                self._cached.removed(*_numbers((event.id,)))
            else:
                self._cached.cleared()

    def note_entered(self, requests: Sequence[EngineRequest]) -> None:
        """Note requests that got a slot, for the next message."""
        if not self._cached.block_tokens:
            return
        for request in requests:
            if not request.preemptions and request_token(request.id) is not None:
                self._cached.entered(request.id, _numbers(request.chain))

    def report_step(
        self,
        part: WorkerStep,
        step: int,
        times_s: tuple[float, float | None],
        finished: Sequence[str],
        ended: Sequence[EngineRequest],
    ) -> None:
        """``times_s``: the length of the step, and the part spent waiting, if it is reported."""
        if self._publisher is not None:
            report = _report(part.worker, step, finished, times_s, part, ended)
            self._publish(self._publisher, report)

    def report_rest(self, model: WorkerModel, step: int, finished: Sequence[str]) -> None:
        """Publish that the engine is idle; no step was taken."""
        if self._publisher is not None and not self._silent:
            self._publish(self._publisher, _report(model, step, finished))

    def _publish(self, publisher: SnapshotPublisher, report: StepReport) -> None:
        report.wave, report.wave_step = self.shared
        publisher.publish(report)


def _numbers(ids: Sequence[Hashable]) -> array[int]:
    """Ids of blocks, which are numbers here; see ``Content.chain``."""
    return array("Q", cast(Sequence[int], ids))


def _told_block(model: WorkerModel) -> int:
    """Tokens of the blocks that are told; 0: none are."""
    engine = model.engine
    size = engine.layers.block_tokens
    told = engine.prefix_cache is not None and is_told(size, engine.kv_tokens // size)
    return size if told else 0


def _report(
    model: WorkerModel,
    step: int,
    finished: Sequence[str] = (),
    times_s: tuple[float, float | None] = (0.0, None),
    part: WorkerStep | None = None,
    ended: Sequence[EngineRequest] = (),
) -> StepReport:
    engine = model.engine
    step_s, waited_s = times_s
    return StepReport(
        step=step,
        time_s=time.time(),
        step_s=step_s,
        waited_s=waited_s,
        rows=[
            (r.id, r.prompt_tokens, r.generated_tokens, r.cached_tokens, r.prefill_left, None)
            for r in (*engine.running, *ended)
        ],
        finished=tuple(finished),
        power_w=model.power_w,
        energy_j=model.energy_j,
        prompt_budget=model.prompt_budget,
        **state_of(engine, part.schedule if part else IDLE),
    )
