"""Takes the steps of a group in wall time, and measures how late they end."""

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Sequence

from engine_patches.stream.prompt_leases import AGREE_STEPS, NO_BUDGET, packed
from engine_patches.stream.publisher import HEARTBEAT_S
from loadgen.emulator.emulated_worker import EmulatedWorker
from loadgen.emulator.record import StepRecord
from loadgen.emulator.timer import StepTimer, engine_now_s
from loadgen.engine.stepping import Step, StepGroup

_LATENESS_WINDOW = 10_000


class Lateness:
    """Lateness of steps, as fractions of their length: maximum of all, quantiles of the latest."""

    def __init__(self) -> None:
        self.max = 0.0
        self._latest: deque[float] = deque(maxlen=_LATENESS_WINDOW)

    def add(self, fraction: float) -> None:
        self._latest.append(fraction)
        self.max = max(self.max, fraction)

    def quantile(self, q: float) -> float:
        """Over the latest 10,000 steps; 0 before the first."""
        ranked = sorted(self._latest)
        return ranked[max(0, math.ceil(q * len(ranked)) - 1)] if ranked else 0.0


class Stepper:
    """Steps one group on an absolute schedule; sleeps while there is no work, or none may begin.

    It calls ``record`` after every step with the step, its wall time and its lateness.
    """

    def __init__(
        self,
        group: StepGroup,
        workers: Sequence[EmulatedWorker],
        time_scale: float,
        lateness: Lateness,
        record: Callable[[Step, float, float], None] | None = None,
    ) -> None:
        self.group = group
        self._workers = {id(worker.model): worker for worker in workers}
        self._time_scale = time_scale
        self._lateness = lateness
        self._record = record
        self._prompt_budget = NO_BUDGET
        self._rests = self._rested = 0  # how often it rested, and steps before the last time
        self._changed = asyncio.Event()
        for worker in workers:
            worker.on_change = self._changed.set

    async def run(self) -> None:
        timer = StepTimer()
        try:
            due_s = time.monotonic()
            while True:
                if not self.group.unfinished:
                    await self._sleep()
                    self._rests += 1
                    due_s = time.monotonic()
                due_s = await self._step(timer, due_s)
        finally:
            timer.close()

    async def _sleep(self) -> None:
        """Sleep until there is work; energy meters advance and publish meanwhile."""
        slept_s = self._rest()
        self._rested = self.group.steps
        self._agree()
        while not self.group.unfinished:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._until(lambda: self.group.unfinished)
            now_s = time.monotonic()
            self.group.rest((now_s - slept_s) / self._time_scale)
            slept_s = now_s
            if not self.group.unfinished:
                self._tell_rest()

    async def _hold(self, wake_s: float) -> None:
        """Take no step before ``wake_s``, unless something changes."""
        held_s = self._rest()
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wake_s * self._time_scale - held_s):
                await self._changed.wait()
        self.group.rest((time.monotonic() - held_s) / self._time_scale)

    def _rest(self) -> float:
        since_s = time.monotonic()
        self.group.rest(0.0)
        self._tell_rest()
        return since_s

    def _tell_rest(self) -> None:
        for worker in self._workers.values():
            if worker.model.live and not worker.hung:
                worker.report_rest()

    async def _step(self, timer: StepTimer, begun_s: float) -> float:
        """Take one step due at ``begun_s``, or none; return the start of the next."""
        self._bound_prompts()
        step = self.group.begin(engine_now_s(self._time_scale))
        if step.wake_s is not None:
            await self._hold(step.wake_s)
            return time.monotonic()
        length_s = step.seconds * self._time_scale
        due_s = begun_s + length_s
        await timer.until(due_s)
        stalled = any(worker.stalls for worker in self._workers.values())
        if stalled:
            await self._until(lambda: not any(w.stalls for w in self._workers.values()))
        now_s = time.monotonic()
        late = (now_s - due_s) / length_s
        if not stalled:
            self._lateness.add(late)
        self._end(step, late)
        return now_s if late > 1 else due_s

    def _bound_prompts(self) -> None:
        """As the plug-in: a worker alone by what it is told, ranks by what they agreed on."""
        if len(self._workers) == 1:
            self._agree()
        for worker in self._live:
            worker.bound_prompts(self._prompt_budget, self._number)

    def _agree(self) -> None:
        """Take the least budget that a worker is told."""
        told = (worker.stream.told_prompt_budget for worker in self._live)
        self._prompt_budget = min(told, key=packed, default=NO_BUDGET)

    @property
    def _live(self) -> list[EmulatedWorker]:
        return [worker for worker in self._workers.values() if worker.model.live]

    @property
    def _number(self) -> int:
        """Steps since the group rested last."""
        return self.group.steps - self._rested

    def _end(self, step: Step, late: float) -> None:
        wall_s = time.time()
        ended = self.group.finish(step, engine_now_s(self._time_scale))
        if self._number % AGREE_STEPS == 1:
            self._agree()
        parts = [
            (self._workers[id(part.worker)], part, done)
            for part, done in zip(step.parts, ended, strict=True)
            if part.engine is part.worker.engine
        ]
        for worker, part, done in parts:
            if len(self._workers) > 1:
                worker.stream.shared = self._rests, self._number
            worker.report_step(part, done, step.number, step.seconds)
        for worker, part, done in parts:
            worker.show_tokens(done)
            worker.fail(part.schedule.failed)
        if self._record is not None:
            self._record(step, wall_s, late)

    async def _until(self, satisfied: Callable[[], bool]) -> None:
        while not satisfied():
            self._changed.clear()
            await self._changed.wait()


def step_record(
    step: Step, wall_s: float, late: float, *, workers: Sequence[EmulatedWorker], barrier: bool
) -> StepRecord:
    """A row of the record: values at the step's start; current ones for other ranks."""
    parts = {part.worker.rank: part for part in step.parts}
    loads, running, waiting, power_w = [], [], [], []
    for worker in workers:
        part, model = parts.get(worker.rank), worker.model
        loads.append(part.load_tokens if part else model.engine.load_tokens)
        running.append(part.running if part else len(model.engine.running))
        waiting.append(part.waiting if part else model.engine.waiting)
        power_w.append(part.power_w if part else model.power_w)
    return StepRecord(
        time_s=wall_s,
        stepped="all" if barrier else str(step.parts[0].worker.rank),
        step=step.number,
        step_s=step.seconds,
        lateness=late,
        load_tokens=tuple(loads),
        running=tuple(running),
        waiting=tuple(waiting),
        power_w=tuple(power_w),
    )
