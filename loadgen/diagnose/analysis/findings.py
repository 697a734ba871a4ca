"""Measurements of a recording's window."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from statistics import fmean

import numpy as np

from loadgen.diagnose.analysis.window import Flags, Window
from router.core.forecast.forecast import Floats, Ints
from router.core.state.barrier import is_barrier
from router.core.step_fit import FittedStepTime, StepFit
from router.core.step_time import StepTime
from router.core.types import Dispatch

# Hardly any request fits above this: a prompt with its output takes a few percent of the memory.
NEARLY_FULL = 0.85
# A step with so much of the most prompt tokens that a worker has computed in one has no more.
PROMPT_BOUND = 0.9
# A free slot gets its next request a step or two later; that is no shortage.
TRANSIT_STEPS = 2
# Engines either time nearly all steps or none.
MOSTLY = 0.9
# Standard errors above the fitted slope: an upper bound on the cost of a token.
_SURE = 4.0


@dataclass(frozen=True, slots=True)
class Barrier:
    """Whether ranks step together."""

    # Of the steps with two or more busy workers, those that all of these made together; None: no
    # such step.
    together_share: float | None
    stepping_share: float  # share of the time that engines spent in steps
    # Step time as a function of the slowest worker's work; None: no such relation.
    fitted: FittedStepTime | None
    # Upper bound on a token's cost from the same steps; None: unknown.
    per_token_most_s: float | None
    # Cost of the fullest worker's tokens as a share of a mean step, t_l max L / dt; None without
    # ``fitted``.
    attention_share: float | None

    @classmethod
    def of(cls, window: Window) -> Barrier:
        several = (window.loads > 0).sum(axis=1) >= 2
        together = window.together[several]
        fitted = _fitted(window)
        peak, seconds = window.peak_tokens, window.step_s
        busy_s, cost = float(seconds.sum()), None
        if fitted is not None:
            cost = min(1.0, fitted.per_token_s * float(peak.sum()) / busy_s)
        return cls(
            together_share=float(together.mean()) if together.size else None,
            stepping_share=min(1.0, busy_s / window.elapsed_s) if window.elapsed_s > 0 else 0.0,
            fitted=fitted,
            per_token_most_s=_most(peak[window.together], seconds[window.together]),
            attention_share=cost,
        )

    @property
    def there(self) -> bool | None:
        """Whether ranks wait for each other; None: unknown."""
        return is_barrier(self.together_share)


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures that a policy is judged by: averages over steps."""

    imbalance_tokens: float  # G max L - sum L
    idle_share: float  # share of the workers' step time spent waiting for the fullest worker
    throughput_tok_s: float  # output tokens per second in steps
    step_s: float

    def scaled(self, new: Figures, old: Figures) -> Figures:
        """These, as measured, times new / old, as simulated.

        The work is the same: of the idle share the time waited per time worked is scaled.
        """
        one, other, over = (
            asdict(each) | {"idle_share": each.idle_share / max(1e-9, 1 - each.idle_share)}
            for each in (self, new, old)
        )
        scaled = {n: one[n] * other[n] / over[n] if over[n] else other[n] for n in one}
        waited = scaled.pop("idle_share")
        return Figures(**scaled, idle_share=waited / (1 + waited))


@dataclass(frozen=True, slots=True)
class Waiting:
    """How much of each step workers wait for the fullest one."""

    # Of the workers' step time; None: unknown, as all below that can be None.
    idle_share: float | None
    # ``measured`` by the engines, or ``modelled``: by how much less work each had than the slowest.
    idle_share_is: str | None
    # Modelled part of it that uneven tokens and requests would cost without prompts.
    decode_share: float | None
    # Modelled part that prompts add, which some workers compute while others wait.
    prompt_share: float | None
    imbalance_tokens: float
    mean_load_tokens: float
    max_load_tokens: float
    step_s: float
    throughput_tok_s: float

    @classmethod
    def of(cls, window: Window, barrier: Barrier) -> Waiting:
        busy_s = float(window.step_s.sum())
        fitted = barrier.fitted if barrier.there else None
        idle_share = how = decode_share = prompt_share = None
        if fitted is not None:
            idle_share, how = _waited_share(window, fitted), "modelled"
            decode_share = _waited_share(window, replace(fitted, per_prompt_token_s=0.0))
            prompt_share = max(0.0, idle_share - decode_share)
        timed = ~np.isnan(window.waited_s)
        if window.steps and timed.mean() >= MOSTLY:
            worker_s = float(window.counted.sum(axis=1)[timed] @ window.step_s[timed])
            idle_share, how = float(window.waited_s[timed].sum()) / worker_s, "measured"
        workers = max(1, int(window.counted.sum()))
        return cls(
            idle_share=idle_share,
            idle_share_is=how,
            decode_share=decode_share,
            prompt_share=prompt_share,
            imbalance_tokens=_mean(window.imbalance_tokens),
            mean_load_tokens=float(window.loads.sum()) / workers,
            max_load_tokens=_mean(window.peak_tokens),
            step_s=_mean(window.step_s),
            throughput_tok_s=float(window.tokens.sum()) / busy_s if busy_s else 0.0,
        )

    @property
    def even_share(self) -> float:
        """Share by which the mean load is below the fullest one's: bounds idle_share from above."""
        if not self.max_load_tokens:
            return 0.0
        return max(0.0, 1 - self.mean_load_tokens / self.max_load_tokens)

    @property
    def figures(self) -> Figures | None:
        """None without an idle share."""
        if self.idle_share is None:
            return None
        return Figures(self.imbalance_tokens, self.idle_share, self.throughput_tok_s, self.step_s)


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the cluster is."""

    workers: int  # counted workers in the median step
    slots: float | None  # mean of a worker; None: not reported
    slots_used: float | None  # share of the slots that hold a request; None without ``slots``
    waiting: float  # mean number of engine requests waiting in the router and the engines
    # Share of the steps with more waiting requests than free slots; without ``slots``, than
    # requests about to enter.
    waiting_share: float
    inside: float  # mean number of engine requests that wait or run
    arrivals_s: float  # requests per second, counted as they end
    # Tokens of the window's second half over those of its first; None: none in the first.
    second_half: float | None
    completed: int
    failed: int
    # prompt_tokens, output_tokens: means of completed engine requests; None: none completed.
    prompt_tokens: float | None
    output_tokens: float | None

    @classmethod
    def of(cls, window: Window) -> Load:
        completed, parts = window.completed, [part.lengths for part in window.parts]
        slots = _slots(window)
        told = slots[~np.isnan(slots)]
        places = float((window.counted * np.nan_to_num(slots)).sum())
        known = bool(told.size) and told.size == slots.size and places > 0
        waiting = window.pool * window.slots_per_request + window.queued
        tokens, late = window.tokens, window.end_s > window.elapsed_s / 2
        first = float(tokens[~late].sum())
        return cls(
            workers=int(np.median(window.counted.sum(axis=1))) if window.steps else len(slots),
            slots=float(told.mean()) if told.size else None,
            slots_used=float(window.running.sum()) / places if known else None,
            waiting=float(waiting.mean()) if waiting.size else 0.0,
            waiting_share=_mean(
                waiting > (_free(window).sum(axis=1) if known else _transit(window))
            ),
            inside=float((waiting + window.running.sum(axis=1)).mean()) if waiting.size else 0.0,
            arrivals_s=len(window.requests) / window.elapsed_s if window.elapsed_s > 1e-6 else 0.0,
            second_half=float(tokens[late].sum()) / first if first else None,
            completed=len(completed),
            failed=len(window.requests) - len(completed),
            prompt_tokens=fmean(prompt for prompt, _ in parts) if parts else None,
            output_tokens=fmean(output for _, output in parts) if parts else None,
        )


@dataclass(frozen=True, slots=True)
class Memory:
    """Whether KV memory, rather than slots, is the bottleneck."""

    kv_tokens: float | None  # mean capacity of a worker; None: not reported
    # used_mean, used_max: shares of it; None: not reported.
    used_mean: float | None
    used_max: float | None
    preemptions: int  # total number; per_request: number per completed request
    per_request: float
    # Share of the slots that are empty while memory or admission keeps requests waiting; None:
    # unknown.
    held_share: float | None

    @classmethod
    def of(cls, window: Window, load: Load) -> Memory:
        kv_tokens = np.array([each.kv_tokens for each in window.workers], dtype=np.float64)
        known = bool(window.steps) and not np.isnan(kv_tokens).any()
        used = window.loads[window.counted.all(axis=1)] / kv_tokens if known else np.zeros(0)
        known = known and bool(used.size)
        return cls(
            kv_tokens=float(kv_tokens.mean()) if known else None,
            used_mean=float(used.mean()) if known else None,
            used_max=float(used.max()) if known else None,
            preemptions=window.preemptions,
            per_request=window.preemptions / max(1, load.completed),
            held_share=_held_share(window, kv_tokens, load),
        )


@dataclass(frozen=True, slots=True)
class Caches:
    """What the workers find of prompts in their prefix caches."""

    cached_share: float | None  # of the prompts' tokens; None: the workers compute no prompts
    told: bool  # whether a worker tells its cache
    # Of numbered blocks of the prompts; None: what prompts share is not known.
    block_tokens: int | None
    ttft_s: float | None  # mean of the completed requests; None: not seen

    @classmethod
    def of(cls, window: Window) -> Caches:
        computed, completed = window.computed_share, window.completed
        ttft_s = [r.first_token_s - r.arrival_s for r in completed if r.first_token_s is not None]
        return cls(
            cached_share=1 - computed if computed else None,
            told=any(each.block_tokens for each in window.workers),
            block_tokens=window.block_tokens if computed else None,
            ttft_s=fmean(ttft_s) if ttft_s else None,
        )


@dataclass(frozen=True, slots=True)
class Findings:
    """All measurements of a window."""

    steps: int
    elapsed_s: float
    barrier: Barrier
    waiting: Waiting
    load: Load
    memory: Memory
    caches: Caches

    @property
    def idle_share_most(self) -> float:
        """The idle share, or its upper bound where it is unknown."""
        waiting, per_token_s = self.waiting, self.barrier.per_token_most_s
        if waiting.idle_share is not None:
            return waiting.idle_share
        if per_token_s is None:
            return waiting.even_share
        idle_s = per_token_s * waiting.imbalance_tokens / self.load.workers
        return min(waiting.even_share, idle_s / waiting.step_s)


def findings(window: Window) -> Findings:
    """Measure a window; without steps the values are zeros and None."""
    barrier, load = Barrier.of(window), Load.of(window)
    return Findings(
        steps=window.steps,
        elapsed_s=window.elapsed_s,
        barrier=barrier,
        waiting=Waiting.of(window, barrier),
        load=load,
        memory=Memory.of(window, load),
        caches=Caches.of(window),
    )


def _mean(values: Floats | Ints | Flags) -> float:
    return float(values.mean()) if values.size else 0.0


def _fitted(window: Window) -> FittedStepTime | None:
    fit = StepFit()
    columns = window.loads, window.running, window.prompts, window.step_s
    for loads, running, prompts, step_s in zip(
        *(column[window.together].tolist() for column in columns), strict=True
    ):
        likely = None
        if fit.fitted is not None:
            work = list(map(fit.fitted.work_s, loads, running, prompts))
            likely = work.index(max(work))
        fit.observe(loads, running, prompts, [0] * len(loads), step_s, likely=likely)
    return fit.finish()


def _most(peak_tokens: Ints, step_s: Floats) -> float | None:
    """Upper bound on the slope of a line through the steps; None if all loads are equal."""
    count = len(peak_tokens)
    x, y = peak_tokens - _mean(peak_tokens), step_s - _mean(step_s)
    spread = float(x @ x)
    if count <= 2 or spread == 0:
        return None
    slope = float(x @ y) / spread
    rest = max(0.0, float(y @ y) - slope * float(x @ y))
    return max(0.0, slope + _SURE * math.sqrt(rest / (count - 2) / spread))


def _waited_share(window: Window, cost: StepTime) -> float:
    """Share of the workers' time by which each had less work than the slowest."""
    work = (
        cost.per_token_s * window.loads
        + cost.per_request_s * window.running
        + cost.per_prompt_token_s * window.prompts
    )
    waits = np.where(window.counted, work.max(axis=1, keepdims=True) - work, 0.0)
    return min(1.0, float(waits.sum()) / window.worker_seconds)


def _slots(window: Window) -> Floats:
    return np.array([each.slots for each in window.workers], dtype=np.float64)


def _free(window: Window) -> Floats:
    """Shape (S, G); 0 for workers that do not count."""
    free: Floats = np.where(window.counted, _slots(window) - window.running, 0.0)
    return free


def _transit(window: Window) -> float:
    """Requests on their way to a free slot at any time."""
    requests = len(window.requests) * window.slots_per_request
    return TRANSIT_STEPS * requests / max(1, window.steps)


def _held_share(window: Window, kv_tokens: Floats, load: Load) -> float | None:
    """Share of the slots that KV memory keeps empty while requests wait.

    Only free slots of workers with nearly full memory count: elsewhere a slow router is the cause.
    A request that waits in an engine is held by that engine, which a recording does not name. If
    every worker has free slots, those of all count for it, but of workers that compute as many
    prompt tokens as they can: there it waits for its turn.
    """
    if load.slots_used is None or not window.steps:
        return None
    slots, free = _slots(window), _free(window)
    full = window.loads >= NEARLY_FULL * np.nan_to_num(kv_tokens, nan=np.inf)
    room = np.where(full, free, 0.0).sum(axis=1)
    everywhere = (free > 0).sum(axis=1) == window.counted.sum(axis=1)
    prompts = window.prompts
    bound = (prompts > 0) & (prompts >= PROMPT_BOUND * prompts.max(axis=0))
    somewhere = np.where(bound, 0.0, free).sum(axis=1)
    held = np.minimum(window.queued, np.where(everywhere, somewhere, room))
    if window.dispatch is Dispatch.POOL:
        pool = window.pool * window.slots_per_request
        held = held + np.minimum(pool, np.maximum(0.0, room - held))
    held = np.maximum(0.0, held - _transit(window))
    return float(held.sum() / (window.counted * slots).sum())
