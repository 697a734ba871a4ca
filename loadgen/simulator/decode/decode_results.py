"""Measurements of a simulation (definitions: arXiv 2601.17855, section 6.1)."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields

import numpy as np

from loadgen.model.power_model import PowerModel
from loadgen.simulator.decode.decode_engines import Residence
from loadgen.simulator.decode.prefill_results import PrefillResult
from router.core.errors import InputError
from router.core.forecast.forecast import Floats, Ints

Report = dict[str, object]


@dataclass(frozen=True, slots=True, eq=False)
class StepRecords:
    """Records of the S steps after the warm-up."""

    seconds: Floats  # duration of each step, shape (S,)
    idle_s: Floats  # time without any request before each step, shape (S,)
    loads: Ints  # KV tokens of running requests, shape (S, G)
    tokens: Ints  # output tokens of the step, shape (S,)
    waiting: Ints  # requests that stayed in the router, shape (S,)

    @property
    def imbalance_tokens(self) -> Ints:
        """G max L - sum L of each step, shape (S,)."""
        imbalance: Ints = self.loads.shape[1] * self.loads.max(axis=1) - self.loads.sum(axis=1)
        return imbalance

    def power_w(self, power: PowerModel) -> Floats:
        """At the utilization L_g / max L; shape (S, G)."""
        peak = self.loads.max(axis=1, keepdims=True)
        return power.watts(self.loads / np.maximum(1, peak))

    def energy_j(self, power: PowerModel) -> float:
        """Of all workers, including the time without requests."""
        idle_w = power.idle_w * self.loads.shape[1]
        return float(self.power_w(power).sum(axis=1) @ self.seconds + idle_w * self.idle_s.sum())


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """Averages over the steps after the warm-up."""

    avg_imbalance_tokens: float  # mean of G max L - sum L
    throughput_tok_s: float
    # Mean of (finish - start) / output tokens, of requests that start and finish after the warm-up.
    tpot_mean_s: float | None
    ttft_mean_s: float | None  # from a request's arrival, if it starts after the warm-up
    ttft_p99_s: float | None
    energy_j: float
    mean_load_tokens: float  # KV tokens of a worker
    max_load_tokens: float  # of the fullest worker
    mean_admitted_prompt_tokens: float | None  # mean prompt length of the started requests
    max_pool_wait_steps: int  # longest wait in the router, including requests that wait at the end
    # Steps that a slot stood free while requests waited, per refill meanwhile.
    slot_bubble_steps: float
    decision_ms_p50: float | None  # None without a clock
    decision_ms_p99: float | None
    steps: int
    completed: int
    waiting_at_end: int  # requests that still waited in the router
    parameters: Report
    prefill: PrefillResult | None = None  # figures of prefill workers, None without any
    records: StepRecords | None = field(default=None, compare=False)  # of every step, on request

    def report(self) -> Report:
        keys = [each.name for each in fields(self) if each.name not in ("prefill", "records")]
        prefill = asdict(self.prefill) if self.prefill else {}
        return {key: getattr(self, key) for key in keys} | prefill


class Recorder:
    """Records a simulation as it runs."""

    def __init__(self, warmup: int) -> None:
        self._warmup = warmup
        self._steps: list[tuple[float, float, int, int]] = []
        self._loads: list[Ints] = []
        self._busy = [0]  # steps before each one at whose decision requests were left waiting
        self._tpot_s: list[float] = []
        self._ttft_s: list[float] = []
        self._prompts: list[int] = []
        self._bubbles: list[int] = []
        self._decision_s: list[float] = []
        self._longest_wait = 0
        self._completed = 0

    def step(self, seconds: float, idle_s: float, loads: Ints, tokens: int, waiting: int) -> None:
        """The values are those of ``StepRecords``."""
        self._steps.append((seconds, idle_s, tokens, waiting))
        self._loads.append(loads)

    def decided(self, step: int, seconds: float) -> None:
        if step >= self._warmup:
            self._decision_s.append(seconds)

    def left_waiting(self, count: int) -> None:
        """Requests still waiting after the decision; once a step, before ``started``."""
        self._busy.append(self._busy[-1] + (count > 0))

    def waited(self, step: int, steps: int) -> None:
        if step >= self._warmup:
            self._longest_wait = max(self._longest_wait, steps)

    def started(self, step: int, residences: Sequence[Residence]) -> None:
        if step < self._warmup:
            return
        busy = self._busy
        for job, *_, free_since in residences:
            self._prompts.append(job.prompt_tokens)
            if free_since >= 0 and busy[step + 1] > busy[free_since]:
                self._bubbles.append(busy[step] - busy[free_since])

    def first_tokens(self, residences: Sequence[Residence], now_s: float) -> None:
        for job, _, start_step, *_ in residences:
            if start_step >= self._warmup:
                self._ttft_s.append(now_s - job.arrival_s)

    def finished(self, step: int, residences: Sequence[Residence], now_s: float) -> None:
        if step < self._warmup:
            return
        self._completed += len(residences)
        for job, _, start_step, start_s, _ in residences:
            if start_step >= self._warmup:
                self._tpot_s.append((now_s - start_s) / job.output_tokens)

    def records(self) -> StepRecords:
        seconds, idle_s, tokens, waiting = zip(*self._steps[self._warmup :], strict=True)
        return StepRecords(
            seconds=np.array(seconds),
            idle_s=np.array(idle_s),
            loads=np.stack(self._loads[self._warmup :]),
            tokens=np.array(tokens),
            waiting=np.array(waiting),
        )

    def result(
        self,
        power: PowerModel,
        parameters: Report,
        prefill: PrefillResult | None = None,
        *,
        keep_records: bool,
    ) -> DecodeResult:
        """Return all averages."""
        if len(self._steps) <= self._warmup:
            raise InputError(
                f"the requests ended after {len(self._steps)} steps, within the warm-up of "
                f"{self._warmup}; lower --warmup, or give a longer trace"
            )
        records = self.records()
        busy_s = float(records.seconds.sum())
        elapsed_s = busy_s + float(records.idle_s.sum())
        return DecodeResult(
            avg_imbalance_tokens=float(records.imbalance_tokens.mean()),
            throughput_tok_s=float(records.tokens.sum()) / elapsed_s,
            tpot_mean_s=_mean(self._tpot_s),
            ttft_mean_s=_mean(self._ttft_s),
            ttft_p99_s=_percentile(self._ttft_s, 99),
            energy_j=records.energy_j(power),
            mean_load_tokens=float(records.loads.mean()),
            max_load_tokens=float(records.loads.max(axis=1).mean()),
            mean_admitted_prompt_tokens=_mean(self._prompts),
            max_pool_wait_steps=self._longest_wait,
            slot_bubble_steps=_mean(self._bubbles) or 0.0,
            decision_ms_p50=_percentile(self._decision_s, 50, 1e3),
            decision_ms_p99=_percentile(self._decision_s, 99, 1e3),
            steps=len(records.seconds),
            completed=self._completed,
            waiting_at_end=int(records.waiting[-1]),
            parameters=parameters,
            prefill=prefill,
            records=records if keep_records else None,
        )


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _percentile(values: Sequence[float], percent: float, scale: float = 1.0) -> float | None:
    return float(np.percentile(values, percent)) * scale if values else None
