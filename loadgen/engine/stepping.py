"""Workers that step together, as a pure model: step time, power and energy, in engine seconds."""

from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.engine.engine import Engine
from loadgen.engine.request import EngineRequest
from loadgen.engine.schedule import Schedule
from loadgen.model.power_model import PowerModel
from router.core.step_time import StepTime


@dataclass(slots=True, eq=False)
class WorkerModel:
    """One worker of a group; at ``speed`` 1 it takes exactly the time of ``StepTime``.

    ``prompt_budget`` is what routers have it keep to; 0: none.
    """

    rank: int
    engine: Engine
    speed: float = 1.0
    live: bool = True
    power_w: float = 0.0
    energy_j: float = 0.0
    prompt_budget: int = 0


@dataclass(frozen=True, slots=True)
class WorkerStep:
    """One worker's part in a step, as of the start of the step."""

    worker: WorkerModel
    engine: Engine  # a restart replaces it
    schedule: Schedule
    load_tokens: int
    running: int
    waiting: int
    power_w: float
    needed_s: float  # time that the worker needs; it waits for the others for the rest of the step


@dataclass(frozen=True, slots=True)
class Step:
    """A step that has begun; ``seconds`` is engine time."""

    number: int
    seconds: float
    parts: tuple[WorkerStep, ...]

    @property
    def wake_s(self) -> float | None:
        """Time of the next schedule if admission holds all requests back; None: a real step."""
        held = [part for part in self.parts if part.engine.unfinished]
        wakes = [part.schedule.wake_s for part in held if not part.engine.used_tokens]
        known = [wake_s for wake_s in wakes if wake_s is not None]
        if len(known) < len(held) or not all(part.schedule.empty for part in self.parts):
            return None
        return min(known, default=None)


class StepGroup:
    """Workers whose steps begin and end together: a whole barrier, or one independent worker.

    The slowest worker decides how long a step is; utilization is relative to the fullest. A worker
    without work steps along with an empty batch while another one has work. Prompts are computed
    in every Nth step, as with vLLM's prefill schedule interval: the same one on all workers, but a
    worker that nothing decodes on, or whose last such step left requests waiting, holds none back.
    """

    def __init__(
        self,
        workers: Sequence[WorkerModel],
        step_time: StepTime,
        power: PowerModel,
        prefill_every: int = 1,
    ) -> None:
        self.workers = tuple(workers)
        self.steps = 0
        self._prefill_every = prefill_every
        self._step_time = step_time
        self._power = power
        self.rest(0.0)

    @property
    def unfinished(self) -> bool:
        return any(worker.live and worker.engine.unfinished for worker in self.workers)

    def begin(self, now_s: float = 0.0) -> Step:
        """Schedule every live worker and compute the length of the step."""
        live = [worker for worker in self.workers if worker.live]
        prefill = self.steps % self._prefill_every == 0
        schedules = [
            worker.engine.schedule(now_s, prefill=prefill or not worker.engine.may_defer_prefills)
            for worker in live
        ]
        peak_tokens = max((worker.engine.load_tokens for worker in live), default=0)
        for worker in live:
            utilization = worker.engine.load_tokens / peak_tokens if peak_tokens else 0.0
            worker.power_w = self._power.watts(utilization)
        # Each worker's own time; the slowest decides for all.
        needed_s = [
            self._step_time.seconds(
                worker.engine.batch_tokens,
                len(worker.engine.batch),
                schedule.prefill_tokens,
                worker.speed,
            )
            for worker, schedule in zip(live, schedules, strict=True)
        ]
        parts = tuple(
            WorkerStep(
                worker=worker,
                engine=worker.engine,
                schedule=schedule,
                load_tokens=worker.engine.load_tokens,
                running=len(worker.engine.running),
                waiting=worker.engine.waiting,
                power_w=worker.power_w,
                needed_s=own_s,
            )
            for worker, schedule, own_s in zip(live, schedules, needed_s, strict=True)
        )
        return Step(self.steps + 1, max(needed_s, default=0.0), parts)

    def finish(self, step: Step, now_s: float = 0.0) -> list[list[EngineRequest]]:
        """End the step: a token for each computed prompt; return the ended requests, by part."""
        self.steps = step.number
        for part in step.parts:
            part.worker.energy_j += part.power_w * step.seconds
        return [part.engine.advance(now_s) for part in step.parts]

    def rest(self, seconds: float) -> None:
        """Account for engine time without work and without steps."""
        for worker in self.workers:
            worker.power_w = self._power.idle_w if worker.live else 0.0
            worker.energy_j += worker.power_w * seconds
