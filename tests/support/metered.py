"""Emulated workers in virtual time whose GPUs are read as the plug-in reads them, through NVML's
double, which plays a recording of their power."""

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from engine_patches.power.nvml import NvmlSource
from engine_patches.power.source import PowerReading
from loadgen.engine.engine import Engine
from loadgen.engine.request import EngineRequest
from loadgen.engine.stepping import StepGroup, WorkerModel
from loadgen.model.power_model import PowerModel
from router.core.step_time import StepTime
from router.core.types import RunningRequest, Snapshot
from tests.support.core import part
from tests.support.nvml import FakeNvml, Gpu
from tests.support.power_recording import Recording, Sample

STEP_TIME = StepTime(base_s=1e-2, per_token_s=2e-6)
POWER = PowerModel(idle_w=90.0, max_w=650.0)
SAMPLE_S = 0.1
READ_S = 0.25
"""How often the plug-in asks NVML."""


@dataclass
class Story:
    """What workers said, in order, and what their GPUs' counters counted meanwhile.

    Attributes:
        said: worker and snapshot, without power.
        samples: of each worker's GPU, every ``SAMPLE_S``.
    """

    said: list[tuple[str, Snapshot]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    def recording(self) -> Recording:
        return Recording(self.samples)


class Fleet:
    """Workers that step together; requests come to them unevenly, with pauses.

    Args:
        workers: how many.
        seed: of the requests.
        time_waits: workers tell how long they waited for the others.
    """

    def __init__(self, workers: int, seed: int, *, time_waits: bool = False) -> None:
        self.story = Story()
        self._time_waits = time_waits
        self._random = random.Random(seed)
        self._models = [WorkerModel(r, Engine(16, 1_000_000)) for r in range(workers)]
        self._group = StepGroup(self._models, STEP_TIME, POWER)
        self._now_s = self._sampled_s = 0.0
        self._sequence = self._requests = 0
        self._sample()
        self._say(0.0)

    def serve(self, steps: int) -> None:
        """Take steps while requests keep coming, most of them to the first workers."""
        for _ in range(steps):
            if self._random.random() < 0.7:
                self._arrive(min(self._random.choices(range(len(self._models)), k=2)))
            self._step()

    def drain(self) -> None:
        """Step until nothing is left."""
        while self._group.unfinished:
            self._step()

    def rest(self, seconds: int) -> None:
        """Nothing runs; workers still say so every second."""
        for _ in range(seconds):
            self._group.rest(1.0)
            self._pass(1.0)
            self._say(0.0)

    def _arrive(self, rank: int) -> None:
        self._requests += 1
        prompt, output = self._random.randint(1, 4000), self._random.randint(2, 60)
        self._models[rank].engine.add(EngineRequest(part(self._requests), prompt, output))

    def _step(self) -> None:
        step = self._group.begin()
        ended = self._group.finish(step)
        self._pass(step.seconds)
        waits = [step.seconds - part.needed_s for part in step.parts]
        done = [tuple(each.id for each in requests) for requests in ended]
        self._say(step.seconds, done, waits if self._time_waits else None)

    def _pass(self, seconds: float) -> None:
        """Time in which the counters grew evenly; they are sampled on the way."""
        self._now_s += seconds
        while self._sampled_s + SAMPLE_S <= self._now_s:
            self._sampled_s += SAMPLE_S
            self._sample(self._now_s - self._sampled_s)

    def _sample(self, ago_s: float = 0.0) -> None:
        """What the counters showed some time ago."""
        for model in self._models:
            energy_j = model.energy_j - model.power_w * ago_s
            device = f"GPU-{model.rank}"
            self.story.samples.append(Sample(self._sampled_s, device, model.power_w, energy_j))

    def _say(
        self,
        step_s: float,
        ended: list[tuple[str, ...]] | None = None,
        waits_s: list[float] | None = None,
    ) -> None:
        self._sequence += 1
        for rank, model in enumerate(self._models):
            running = tuple(
                RunningRequest(r.id, r.prompt_tokens, r.generated_tokens, 0, r.prefill_left)
                for r in model.engine.running
            )
            snapshot = Snapshot(
                "full",
                "default",
                str(rank),
                rank,
                epoch="e1",
                sequence=self._sequence,
                step=self._group.steps,
                time_s=self._now_s,
                step_s=step_s,
                running=running,
                finished=ended[rank] if ended else (),
                waited_s=waits_s[rank] if waits_s else None,
            )
            self.story.said.append((str(rank), snapshot))


@dataclass
class Meters:
    """A source of each worker's power, by NVML's double, as a recording goes on."""

    recording: Recording
    counter: bool = True

    def __post_init__(self) -> None:
        self._nvml = FakeNvml([Gpu(device) for device in self.recording.devices])
        self._read_s = -READ_S
        self._told: dict[str, PowerReading] = defaultdict(PowerReading)
        self._sources = {
            str(rank): NvmlSource((device,), load=lambda: self._nvml)
            for rank, device in enumerate(self.recording.devices)
        }

    def at(self, worker: str, time_s: float) -> PowerReading:
        """What the plug-in had read last."""
        while self._read_s + READ_S <= time_s:
            self._read_s += READ_S
            self._play(self._read_s)
            for name, source in self._sources.items():
                self._told[name] = source.read(self._read_s)
        return self._told[worker]

    def used_j(self) -> float:
        """What the recorded counters counted, all together."""
        ends = [(self.recording.begin_s, -1), (self.recording.end_s, 1)]
        return sum(sign * energy_j for s, sign in ends for energy_j in self._counters(s))

    def _counters(self, time_s: float) -> Iterator[float]:
        for device in self.recording.devices:
            yield self.recording.at(device, time_s).energy_j or 0.0

    def _play(self, time_s: float) -> None:
        for gpu in self._nvml.gpus:
            told = self.recording.at(gpu.uuid, min(time_s, self.recording.end_s))
            gpu.power_mw = round((told.power_w or 0.0) * 1e3)
            gpu.energy_mj = round((told.energy_j or 0.0) * 1e3) if self.counter else None
