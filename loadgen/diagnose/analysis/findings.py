"""What was measured in the window of a recording, in numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from loadgen.diagnose.analysis.window import Flags, Window
from router.core.energy.step_fit import FittedStep, StepFit
from router.core.forecast.step_cost import Floats, Ints
from router.core.state.barrier import is_barrier
from router.core.types import Dispatch

# Memory this full admits next to nobody: a prompt and its output take a few percent.
NEARLY_FULL = 0.85
# Between a slot's becoming free and its next request there is a step or two: no sign of any want.
TRANSIT_STEPS = 2
# Timed by the engines at most steps, or not at all.
MOSTLY = 0.9
# Standard errors above what the steps show, beyond which the cost of a token surely does not lie.
_SURE = 4.0


@dataclass(frozen=True, slots=True)
class Barrier:
    """Whether ranks step together.

    Attributes:
        together_share: of the steps in which two workers or more had something to run, those that
            all of these made together; None: there was no such step.
        stepping_share: of the time, how much the engines spent in steps.
        fitted: the step's time by the load of the fullest worker; None: it does not follow it.
        per_token_most_s: what a token costs at the most, by the same steps; None: nobody knows.
        attention_share: of a mean step, what the fullest worker's tokens cost: t_l max L / dt;
            None: no ``fitted``.
    """

    together_share: float | None
    stepping_share: float
    fitted: FittedStep | None
    per_token_most_s: float | None
    attention_share: float | None

    @property
    def there(self) -> bool | None:
        """Ranks wait for each other; None: not known."""
        return is_barrier(self.together_share)


@dataclass(frozen=True, slots=True)
class Figures:
    """What a policy is judged by: averages over steps.

    Attributes:
        imbalance_tokens: G max L - sum L.
        idle_share: of the workers' time in steps, what they wait for the fullest.
        throughput_tok_s: output tokens per second in steps, one token per running request and step.
        step_s: a step.
    """

    imbalance_tokens: float
    idle_share: float
    throughput_tok_s: float
    step_s: float


@dataclass(frozen=True, slots=True)
class Waiting:
    """How much of each step is waiting for the fullest worker.

    Attributes:
        idle_share: None: not known.
        idle_share_is: ``measured`` by the engines, or ``modelled``: t_l (G max L - sum L) over G
            times the step's time; None: not known.
        imbalance_tokens: G max L - sum L, mean over steps.
        mean_load_tokens, max_load_tokens: of a worker, of the fullest, means over steps.
        step_s: mean time of a step.
        throughput_tok_s: see ``Figures``.
    """

    idle_share: float | None
    idle_share_is: str | None
    imbalance_tokens: float
    mean_load_tokens: float
    max_load_tokens: float
    step_s: float
    throughput_tok_s: float

    @property
    def even_share(self) -> float:
        """By how much the mean load is below the fullest one's: no idle share is larger."""
        if not self.max_load_tokens:
            return 0.0
        return max(0.0, 1 - self.mean_load_tokens / self.max_load_tokens)

    @property
    def figures(self) -> Figures | None:
        """These, where the idle share is known."""
        if self.idle_share is None:
            return None
        return Figures(self.imbalance_tokens, self.idle_share, self.throughput_tok_s, self.step_s)


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the cluster is.

    Attributes:
        workers: that count, in the median step.
        slots: of a worker, mean; None: not told.
        slots_used: share of the slots with a request in them; None: ``slots`` is.
        waiting: engine requests that wait, in the router and the engines, mean over steps.
        waiting_share: of the steps, those in which more wait than slots are free; without
            ``slots``, than are about to enter anyway.
        inside: engine requests that wait or run, mean over steps.
        arrivals_s: requests that ended per second.
        second_half: tokens of the window's second half against those of the first; None: there
            are none in the first.
        completed: requests with their whole answer.
        failed: those without.
        prompt_tokens, output_tokens: of an engine request of the completed ones, means; None:
            there are none.
    """

    workers: int
    slots: float | None
    slots_used: float | None
    waiting: float
    waiting_share: float
    inside: float
    arrivals_s: float
    second_half: float | None
    completed: int
    failed: int
    prompt_tokens: float | None
    output_tokens: float | None


@dataclass(frozen=True, slots=True)
class Memory:
    """Whether KV memory, rather than slots, is what is short.

    Attributes:
        kv_tokens: of a worker, mean; None: not told.
        used_mean, used_max: share of it; None: not told.
        preemptions: in all; per_request: for each completed request.
        held_share: of the slots, those that stand empty while requests wait which memory or
            admission keeps out; None: not known.
    """

    kv_tokens: float | None
    used_mean: float | None
    used_max: float | None
    preemptions: int
    per_request: float
    held_share: float | None


@dataclass(frozen=True, slots=True)
class Findings:
    """All that was measured."""

    steps: int
    elapsed_s: float
    barrier: Barrier
    waiting: Waiting
    load: Load
    memory: Memory


def findings(window: Window) -> Findings:
    """Measure; a window without steps gives zeros and None."""
    barrier = _barrier(window)
    load = _load(window)
    return Findings(
        steps=window.steps,
        elapsed_s=window.elapsed_s,
        barrier=barrier,
        waiting=_waiting(window, barrier),
        load=load,
        memory=_memory(window, load),
    )


def _mean(values: Floats | Ints | Flags) -> float:
    return float(values.mean()) if values.size else 0.0


def _barrier(window: Window) -> Barrier:
    several = (window.loads > 0).sum(axis=1) >= 2
    together = window.together[several]
    fit = StepFit()
    peak, seconds = window.peak_tokens, window.step_s
    for tokens, step_s in zip(
        peak[window.together].tolist(), seconds[window.together].tolist(), strict=True
    ):
        fit.observe(tokens, step_s)
    fitted = fit.fitted()
    busy_s = float(seconds.sum())
    cost = None
    if fitted is not None:
        cost = min(1.0, fitted.per_token_s * float(peak.sum()) / busy_s)
    return Barrier(
        together_share=float(together.mean()) if together.size else None,
        stepping_share=min(1.0, busy_s / window.elapsed_s) if window.elapsed_s > 0 else 0.0,
        fitted=fitted,
        per_token_most_s=_most(peak[window.together], seconds[window.together]),
        attention_share=cost,
    )


def _most(peak_tokens: Ints, step_s: Floats) -> float | None:
    """The upper end of the slope of a line through the steps; None: the loads are all alike."""
    count = len(peak_tokens)
    x, y = peak_tokens - _mean(peak_tokens), step_s - _mean(step_s)
    spread = float(x @ x)
    if count <= 2 or spread == 0:
        return None
    slope = float(x @ y) / spread
    rest = max(0.0, float(y @ y) - slope * float(x @ y))
    return max(0.0, slope + _SURE * math.sqrt(rest / (count - 2) / spread))


def _waiting(window: Window, barrier: Barrier) -> Waiting:
    busy_s = float(window.step_s.sum())
    fitted = barrier.fitted if barrier.there else None
    idle_share, how = _idle_share(window, fitted)
    workers = max(1, int(window.counted.sum()))
    return Waiting(
        idle_share=idle_share,
        idle_share_is=how,
        imbalance_tokens=_mean(window.imbalance_tokens),
        mean_load_tokens=float(window.loads.sum()) / workers,
        max_load_tokens=_mean(window.peak_tokens),
        step_s=_mean(window.step_s),
        throughput_tok_s=float(window.running.sum()) / busy_s if busy_s else 0.0,
    )


def _idle_share(window: Window, fitted: FittedStep | None) -> tuple[float | None, str | None]:
    timed = ~np.isnan(window.waited_s)
    if window.steps and timed.mean() >= MOSTLY:
        worker_s = float(window.counted.sum(axis=1)[timed] @ window.step_s[timed])
        return float(window.waited_s[timed].sum()) / worker_s, "measured"
    if fitted is None:
        return None, None
    idle_s = fitted.per_token_s * float(window.imbalance_tokens.sum())
    return min(1.0, idle_s / window.worker_seconds), "modelled"


def _load(window: Window) -> Load:
    completed, parts = window.completed, [lengths for _, lengths in window.parts]
    slots = _slots(window)
    told = slots[~np.isnan(slots)]
    places = float((window.counted * np.nan_to_num(slots)).sum())
    known = bool(told.size) and told.size == slots.size and places > 0
    waiting = window.pool * window.slots_per_request + window.queued
    return Load(
        workers=int(np.median(window.counted.sum(axis=1))) if window.steps else len(slots),
        slots=float(told.mean()) if told.size else None,
        slots_used=float(window.running.sum()) / places if known else None,
        waiting=float(waiting.mean()) if waiting.size else 0.0,
        waiting_share=_mean(waiting > (_free(window).sum(axis=1) if known else _transit(window))),
        inside=float((waiting + window.running.sum(axis=1)).mean()) if waiting.size else 0.0,
        arrivals_s=len(window.requests) / window.elapsed_s if window.elapsed_s > 1e-6 else 0.0,
        second_half=_second_half(window),
        completed=len(completed),
        failed=len(window.requests) - len(completed),
        prompt_tokens=fmean(prompt for prompt, _ in parts) if parts else None,
        output_tokens=fmean(output for _, output in parts) if parts else None,
    )


def _second_half(window: Window) -> float | None:
    tokens, late = window.running.sum(axis=1), window.end_s > window.elapsed_s / 2
    first = float(tokens[~late].sum())
    return float(tokens[late].sum()) / first if first else None


def _slots(window: Window) -> Floats:
    return np.array([each.slots for each in window.workers], dtype=np.float64)


def _free(window: Window) -> Floats:
    """Shape (S, G): slots without a request; of workers that do not count, none."""
    free: Floats = np.where(window.counted, _slots(window) - window.running, 0.0)
    return free


def _transit(window: Window) -> float:
    """Requests that are under way to a free slot at any time."""
    requests = len(window.requests) * window.slots_per_request
    return TRANSIT_STEPS * requests / max(1, window.steps)


def _memory(window: Window, load: Load) -> Memory:
    kv_tokens = np.array([each.kv_tokens for each in window.workers], dtype=np.float64)
    known = bool(window.steps) and not np.isnan(kv_tokens).any()
    used = window.loads[window.counted.all(axis=1)] / kv_tokens if known else np.zeros(0)
    known = known and bool(used.size)
    return Memory(
        kv_tokens=float(kv_tokens.mean()) if known else None,
        used_mean=float(used.mean()) if known else None,
        used_max=float(used.max()) if known else None,
        preemptions=window.preemptions,
        per_request=window.preemptions / max(1, load.completed),
        held_share=_held_share(window, kv_tokens, load),
    )


def _held_share(window: Window, kv_tokens: Floats, load: Load) -> float | None:
    """Slots that stand empty although somebody waits who could be in them.

    Whoever waits in the router may be kept from workers whose memory is nearly full; from others a
    slow router keeps him, which is another want. Whoever waits in an engine is held by that one,
    whose name a recording does not have: by one whose memory is nearly full, or by any if none has
    its slots full.
    """
    if load.slots_used is None or not window.steps:
        return None
    slots, free = _slots(window), _free(window)
    full = window.loads >= NEARLY_FULL * np.nan_to_num(kv_tokens, nan=np.inf)
    room = np.where(full, free, 0.0).sum(axis=1)
    everywhere = (free > 0).sum(axis=1) == window.counted.sum(axis=1)
    held = np.minimum(window.queued, np.where(everywhere, free.sum(axis=1), room))
    if window.dispatch is Dispatch.POOL:
        pool = window.pool * window.slots_per_request
        held = held + np.minimum(pool, np.maximum(0.0, room - held))
    held = np.maximum(0.0, held - _transit(window))
    return float(held.sum() / (window.counted * slots).sum())
