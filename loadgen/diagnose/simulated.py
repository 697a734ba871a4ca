"""Simulation of each policy on the recorded requests.

The simulation repeats the requests that ended in the window, on the recorded workers and slots, at
the fitted step time. Where requests waited, it keeps as many in the system as the recording had.
Else each arrives at its recorded time; those from before the window come at its end.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from itertools import count, cycle

import numpy as np

from loadgen.diagnose.analysis.findings import Figures, Findings
from loadgen.diagnose.analysis.prospects import Mode, Prospect, Prospects
from loadgen.diagnose.analysis.window import Window
from loadgen.model.power_model import PowerModel
from loadgen.simulator.decode.barrier_decode import simulate
from loadgen.simulator.decode.decode_config import DecodeConfig
from loadgen.simulator.decode.length_sources import TraceLengths
from loadgen.simulator.decode.oracle import Knowledge
from loadgen.simulator.decode.request_streams import ClosedStream, Job, Stream, TimedStream
from loadgen.traces.trace import Trace, TraceRequest
from router.core.policies.policy_table import POLICIES
from router.core.step_time import StepTime
from router.core.types import Dispatch

# Defaults of ``evenstep serve``: forecast, and waiting time after which a request goes first.
_LOOKAHEAD = "survival"
_STARVATION_S = 5.0
# Delay from a decision to the request's first step in an engine that does not wait for it.
_DELAY_STEPS = 1
# With shorter outputs, a delay of one step empties more than 2 % of the slots' time. The router
# then queues a few requests in the engines (``router.core.rounds.overcommit``).
_SHORT_OUTPUT_TOKENS = 65
_MOST_QUEUED = 2
# Warm-up, until the simultaneous start of the first requests no longer shows.
_WARMUP_LIVES = 4
_WARMUP_STEPS = (300, 4000)
_MEASURED_STEPS = (1500, 6000)
# Share of steps with waiting requests from which on the system is kept full.
FULL_SHARE = 0.5
# BF-IO chooses among waiting requests; assigning at once leaves it no choice.
_POOL_ONLY = frozenset({"bfio"})


@dataclass(frozen=True, slots=True)
class _Outcome:
    figures: Figures
    energy_j_per_token: float


@dataclass(frozen=True, slots=True)
class _Setting:
    """Common settings of the simulations."""

    window: Window
    mode: Mode
    clients: int
    slots: int
    workers: int
    step_time: StepTime
    deadline_steps: int
    overcommit: int
    warmup: int
    steps: int


def prospects(
    window: Window, found: Findings, policies: Collection[str] = tuple(POLICIES), seed: int = 0
) -> Prospects:
    """Simulate policies; deterministic.

    Args:
        window: with completed requests.
        found: its findings, with a fitted step time, known slots and a known idle share.
        policies: at least one; the one in force is always simulated.
        seed: of policies that draw at random.
    """
    setting, measured = _setting(window, found), found.waiting.figures
    assert measured is not None
    outcomes = {
        (policy, dispatch): _simulated(setting, policy, dispatch, seed)
        for policy, row in POLICIES.items()
        for dispatch in sorted(row.dispatch, key=str)
        if (policy, dispatch) == (window.policy, window.dispatch)
        or (policy in policies and (dispatch is Dispatch.POOL or policy not in _POOL_ONLY))
    }
    current = None
    if window.policy is not None and window.dispatch is not None:
        current = outcomes.get((window.policy, window.dispatch))
    rows = [
        Prospect(
            policy,
            dispatch,
            outcome is current,
            outcome.figures,
            _predicted(measured, outcome.figures, current),
            outcome.energy_j_per_token,
        )
        for (policy, dispatch), outcome in outcomes.items()
    ]
    rows.sort(key=lambda row: -row.simulated.throughput_tok_s)
    better = {row.policy: row for row in reversed(rows)}
    chosen = [row for row in rows if row.current or row is better[row.policy]]
    return Prospects(setting.mode, len(window.completed), setting.steps, tuple(chosen))


def _setting(window: Window, found: Findings) -> _Setting:
    load, fitted = found.load, found.barrier.fitted
    assert fitted is not None
    assert load.slots is not None
    assert load.output_tokens is not None
    # As many queue in each engine as recorded, else by the router's rule.
    overcommit = int(load.output_tokens < _SHORT_OUTPUT_TOKENS)
    if window.dispatch is Dispatch.POOL:
        overcommit = min(_MOST_QUEUED, round(float(window.queued.mean()) / load.workers))
    lives = math.ceil(_WARMUP_LIVES * load.output_tokens)
    wall_step_s = found.waiting.step_s * window.time_scale
    return _Setting(
        window=window,
        mode="full" if load.waiting_share >= FULL_SHARE else "arrivals",
        clients=max(1, round(load.inside)),
        slots=max(1, round(load.slots)),
        workers=load.workers,
        step_time=_decode_time(window, fitted),
        deadline_steps=max(1, round(_STARVATION_S / wall_step_s)),
        overcommit=overcommit,
        warmup=_between(_WARMUP_STEPS, lives),
        steps=_between(_MEASURED_STEPS, window.steps),
    )


def _decode_time(window: Window, fitted: StepTime) -> StepTime:
    """The cost of tokens, and as the base all else in a mean step."""
    rest_s = float((window.step_s - fitted.per_token_s * window.peak_tokens).mean())
    return StepTime(max(rest_s, 1e-9), fitted.per_token_s)


def _between(bounds: tuple[int, int], value: int) -> int:
    return min(max(value, bounds[0]), bounds[1])


def _simulated(setting: _Setting, policy: str, dispatch: Dispatch, seed: int) -> _Outcome:
    pool = dispatch is Dispatch.POOL
    config = DecodeConfig(
        policy=policy,
        lengths=recorded_lengths(setting.window),
        workers=setting.workers,
        slots=setting.slots,
        pool=max(1, setting.clients),
        steps=setting.warmup + setting.steps,
        warmup=setting.warmup,
        seed=seed,
        dispatch=dispatch,
        dispatch_delay=_DELAY_STEPS if pool else 0,
        overcommit=setting.overcommit if pool else 0,
        deadline_steps=setting.deadline_steps if pool else 0,
        knowledge=Knowledge.parse(_LOOKAHEAD if POLICIES[policy].looks_ahead else "none"),
        step_time=setting.step_time,
    )
    stream: Stream = TimedStream(_in_a_circle(setting.window))
    if setting.mode == "full":
        rows = [lengths for _, lengths in setting.window.parts]
        stream = ClosedStream(cycle(rows), setting.clients)
    records = simulate(config, stream=stream, keep_records=True).records
    assert records is not None
    busy_s, tokens = float(records.seconds.sum()), float(records.tokens.sum())
    imbalance = records.imbalance_tokens
    idle_s = setting.step_time.per_token_s * float(imbalance.sum())
    power = PowerModel()
    energy_j = float(records.power_w(power).sum(axis=1) @ records.seconds)
    return _Outcome(
        Figures(
            imbalance_tokens=float(imbalance.mean()),
            idle_share=idle_s / (records.loads.shape[1] * busy_s),
            throughput_tok_s=tokens / busy_s,
            step_s=float(np.mean(records.seconds)),
        ),
        energy_j / max(1.0, tokens),
    )


def recorded_lengths(window: Window) -> TraceLengths:
    """The lengths of the window's engine requests."""
    rows = tuple(TraceRequest(*lengths) for _, lengths in window.parts)
    return TraceLengths.of(Trace("recorded", "recording", rows))


def _in_a_circle(window: Window) -> Iterator[Job]:
    """Repeated without end; arrivals from before the window come at its end."""
    length_s = window.elapsed_s
    timed = sorted((at_s % length_s, lengths) for at_s, lengths in window.parts)
    numbers = count()
    for turn in count():
        for at_s, lengths in timed:
            yield Job(next(numbers), *lengths, turn * length_s + at_s)


def _predicted(measured: Figures, simulated: Figures, current: _Outcome | None) -> Figures:
    if current is None:
        return simulated
    now, new, old = map(asdict, (measured, simulated, current.figures))
    scaled = {name: now[name] * new[name] / old[name] if old[name] else new[name] for name in now}
    return Figures(**scaled)
