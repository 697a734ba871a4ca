"""One engine under KV pressure in virtual time: the emulated engine and an admission policy.

Requests arrive at their times, wait and run on ``loadgen.engine.engine`` until the last one ends. A
step takes the time of the scenario's cost.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum

import numpy as np

from engine_patches.admission import clearing_of, make_admission
from engine_patches.admission.settings import AdmissionSettings
from engine_patches.admission.theory.fluid import Batch
from loadgen.engine.engine import Engine
from loadgen.engine.queues import Eviction, PolicyOrder
from loadgen.engine.request import EngineRequest
from loadgen.engine.schedule import Schedule
from loadgen.model.ranges import check_ranges
from loadgen.simulator.admission.admission_results import AdmissionRecorder, AdmissionResult
from loadgen.simulator.admission.predictions import Prediction
from loadgen.simulator.admission.scenarios import Requests, Scenario
from router.core.errors import ConfigError, InputError

# Bound on discarded tokens: this multiple of all outputs, or of the memory while none ends.
_ENDLESS = 20
_RANGES = {"rate": (1e-6, 1e6), "requests": (1, 5_000_000)}


class EvictionKind(StrEnum):
    """What a preempted request keeps of its output; a cleared one keeps nothing."""

    KEEP = "keep"
    RESTART = "restart"


class Order(StrEnum):
    """What a step computes first; Sarathi is vLLM's order with smaller chunks."""

    VLLM = "vllm"
    SARATHI = "sarathi"
    PREFILL_FIRST = "prefill_first"


class EndlessError(InputError):
    """The same requests are evicted again and again, and hardly any ever ends."""


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """One simulation."""

    settings: AdmissionSettings
    scenario: Scenario
    seed: int = 0
    prediction: Prediction = field(default_factory=Prediction)
    eviction: EvictionKind = EvictionKind.KEEP
    order: Order = Order.VLLM
    watermark: float = 0.0
    # KV tokens without time cost (arXiv 2504.11320, section 2.3, piecewise linear).
    free_tokens: int = 0
    block_tokens: int = 1

    def __post_init__(self) -> None:
        check_ranges(self.scenario, _RANGES)
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"--watermark must be from 0 to below 1, got {self.watermark:g}")
        for option, given in (("--free-tokens", self.free_tokens), ("--seed", self.seed)):
            if given < 0:
                raise ConfigError(f"{option} must be at least 0, got {given}")
        if self.scenario.chunk <= self.scenario.slots:
            raise ConfigError(
                f"--max-num-batched-tokens {self.scenario.chunk} must be above --max-num-seqs "
                f"{self.scenario.slots}: a step computes a token of each request that decodes"
            )

    def step_s(self, batch: Batch) -> float:
        costly = max(0.0, batch.kv_tokens - self.free_tokens)
        return self.scenario.cost.seconds(costly, batch.requests, batch.prompt_tokens)

    @property
    def effective_eviction(self) -> EvictionKind:
        """Eviction in force: a clearing policy always restarts."""
        return EvictionKind.RESTART if clearing_of(self.settings) else self.eviction

    def engine(self) -> Engine:
        scenario, settings = self.scenario, self.settings
        restart = self.effective_eviction is EvictionKind.RESTART
        rng = np.random.default_rng([self.seed, 3])
        return Engine(
            scenario.slots,
            scenario.kv_tokens,
            block_tokens=self.block_tokens,
            chunk=scenario.chunk,
            watermark=self.watermark,
            prefill_first=self.order is Order.PREFILL_FIRST,
            eviction=Eviction(restart, clearing_of(settings), rng),
            queue=PolicyOrder(make_admission(settings)),
        )

    def described(self) -> dict[str, object]:
        scenario = self.scenario
        return asdict(self.settings) | {
            "scenario": scenario.name,
            "rate": scenario.rate,
            "requests": scenario.requests,
            "seed": self.seed,
            "prediction": str(self.prediction),
            "eviction": str(self.effective_eviction),
            "order": str(self.order),
            "watermark": self.watermark,
            "kv_tokens": scenario.kv_tokens,
            "block_size": self.block_tokens,
            "max_num_seqs": scenario.slots,
            "max_num_batched_tokens": scenario.chunk,
            "step_cost": asdict(scenario.cost),
            "free_tokens": self.free_tokens,
        }


def simulate_admission(config: AdmissionConfig) -> AdmissionResult:
    """Run one simulation to the end of its last request.

    The same configuration gives the same result. The requests are the same for every policy.

    Raises:
        ConfigError: a request that the memory could never hold.
        EndlessError: the requests would never end.
    """
    return _Simulation(config).run()


class _Simulation:
    def __init__(self, config: AdmissionConfig) -> None:
        self._config = config
        scenario, block = config.scenario, config.block_tokens
        requests = scenario.source.draw(scenario.rate, scenario.requests, config.seed)
        largest = int((requests.prompt_tokens + requests.output_tokens).max()) - 1
        if -(-largest // block) > scenario.kv_tokens // block:
            raise ConfigError(
                f"--kv-tokens {scenario.kv_tokens} is too small: the longest request of "
                f"{scenario.name} takes {largest} KV tokens, in whole blocks of {block}"
            )
        self._engine = config.engine()
        self._recorder = AdmissionRecorder(requests, config.scenario.kv_tokens)
        self._coming = _engine_requests(requests, config)
        self._next = next(self._coming, None)
        self._taken: list[EngineRequest] = []
        # Without a first token: not yet admitted, and admitted.
        self._unbegun: dict[str, EngineRequest] = {}
        self._beginning: dict[str, EngineRequest] = {}
        self._most_lost = _ENDLESS * int(requests.output_tokens.sum())
        self._lost_at_end = 0
        self._now_s = 0.0

    def run(self) -> AdmissionResult:
        engine = self._engine
        while self._next is not None or self._taken or engine.unfinished:
            self._take(math.nextafter(self._now_s, math.inf))
            for request in self._taken:
                engine.add(request)
            self._taken.clear()
            if engine.unfinished:
                self._step()
            elif self._next is not None:
                self._now_s = self._next.arrived_s
        tokens = engine.generated_total - engine.lost_total
        return self._recorder.result(
            self._now_s, tokens, engine.preemptions_total, self._config.described()
        )

    def _take(self, until_s: float) -> None:
        """Take the arrivals before ``until_s``."""
        while self._next is not None and self._next.arrived_s < until_s:
            self._unbegun[self._next.id] = self._next
            self._taken.append(self._next)
            self._next = next(self._coming, None)

    def _step(self) -> None:
        engine, recorder = self._engine, self._recorder
        tokens = engine.generated_total - engine.lost_total
        recorder.began(self._now_s, tokens, engine.preemptions_total)
        schedule = engine.schedule(self._now_s)
        lost = engine.lost_total
        since_end = _ENDLESS * self._config.scenario.kv_tokens
        if lost > self._most_lost or lost - self._lost_at_end > since_end:
            raise EndlessError(
                f"{_ENDLESS} times the output of all requests was thrown away, or the whole memory "
                "so often without a request that ended: the same ones are evicted again and "
                "again; leave more memory free, or clear fewer"
            )
        if not schedule.prefill_tokens and not schedule.decode_tokens:
            self._hold(schedule)
            return
        batch = Batch(engine.batch_tokens, len(engine.batch), schedule.prefill_tokens)
        seconds = self._config.step_s(batch)
        recorder.step(seconds, engine.used_tokens)
        self._now_s += seconds
        self._take(self._now_s)
        ended = engine.advance(self._now_s)
        for id_ in schedule.admitted:
            if (new := self._unbegun.pop(id_, None)) is not None:
                self._beginning[id_] = new
        begun = [request for request in self._beginning.values() if request.generated_tokens]
        for request in begun:
            del self._beginning[request.id]
            recorder.first_token(int(request.id), self._now_s)
        for request in ended:
            recorder.ended(int(request.id), self._now_s)
            self._lost_at_end = engine.lost_total

    def _hold(self, schedule: Schedule) -> None:
        """With nothing to compute, skip to the policy's wake time or the next arrival.

        After a clearing of all requests it returns at once: no request enters in such a step.
        """
        if schedule.preempted:
            return
        until_s = math.inf if schedule.wake_s is None else schedule.wake_s
        if self._next is not None:
            until_s = min(until_s, self._next.arrived_s)
        if not self._now_s < until_s < math.inf:
            raise EndlessError("requests wait, nobody runs, and the policy lets nobody in")
        self._recorder.hold(until_s - self._now_s, self._engine.used_tokens)
        self._now_s = until_s


def _engine_requests(requests: Requests, config: AdmissionConfig) -> Iterator[EngineRequest]:
    hints = config.prediction.hints(
        requests.output_tokens, config.scenario.source.cap_tokens, config.seed
    )
    columns = (requests.arrival_s, requests.prompt_tokens, requests.output_tokens, requests.kinds)
    rows = zip(*(column.tolist() for column in columns), hints, strict=True)
    for number, (arrived_s, prompt, output, kind, hint) in enumerate(rows):
        yield EngineRequest(
            id=str(number),
            prompt_tokens=prompt,
            output_tokens=output,
            cap_tokens=config.scenario.source.cap_tokens,
            hint_tokens=hint,
            kind=kind,
            arrived_s=arrived_s,
        )
