"""Simulation of each policy on the recorded requests.

The simulation repeats the requests that ended in the window, on the recorded workers and slots, at
the fitted step time. Where requests waited, it keeps as many in the system as the recording had.
Else each arrives at its recorded time; those from before the window come at its end. Where workers
compute prompts, whole engines are simulated, with prefix caches if the recording tells what prompts
share; else their decode steps alone.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import count, cycle, islice

import numpy as np

from loadgen.diagnose.analysis.findings import Findings
from loadgen.diagnose.analysis.prospects import Caching, Prospect, Prospects
from loadgen.diagnose.analysis.window import Window
from loadgen.diagnose.setting import Setting, setting_of
from loadgen.model.power_model import PowerModel
from loadgen.simulator.decode.barrier_decode import simulate
from loadgen.simulator.decode.decode_config import DecodeConfig
from loadgen.simulator.decode.length_sources import TraceLengths
from loadgen.simulator.decode.oracle import Knowledge
from loadgen.simulator.decode.request_streams import ClosedStream, Job, Stream, TimedStream
from loadgen.simulator.serving.serving_config import ServingConfig
from loadgen.simulator.serving.serving_simulation import simulate_serving
from loadgen.traces.arrivals import Arrivals
from loadgen.traces.trace import Trace, TraceRequest
from router.core.policies.policy_table import POLICIES
from router.core.types import Dispatch

# Forecast by default of ``evenstep serve``.
_LOOKAHEAD = "survival"
# Delay from a decision to the request's first step in an engine that does not wait for it.
_DELAY_STEPS = 1
# BF-IO chooses among waiting requests; assigning at once leaves it no choice.
_POOL_ONLY = frozenset({"bfio"})
# KV tokens: memory does not bind in the simulations.
_UNBOUNDED = 10**12


def prospects(
    window: Window, found: Findings, policies: Collection[str] = tuple(POLICIES), seed: int = 0
) -> Prospects:
    """Simulate policies, the one in force in any case; deterministic.

    The window has completed requests, a fitted step time, known slots and a known idle share.
    """
    setting, measured = setting_of(window, found), found.waiting.figures
    assert measured is not None
    simulated = _whole_engines if setting.computes_prompts else _decode_steps
    in_force = window.policy, window.dispatch
    rows = [
        simulated(setting, policy, dispatch, seed)
        for policy, row in POLICIES.items()
        for dispatch in sorted(row.dispatch, key=str)
        if (policy, dispatch) == in_force
        or (policy in policies and (dispatch is Dispatch.POOL or policy not in _POOL_ONLY))
    ]
    current = next((row for row in rows if (row.policy, row.dispatch) == in_force), None)
    if current is not None:
        rows = [
            replace(
                row,
                current=row is current,
                predicted=measured.scaled(row.simulated, current.simulated),
            )
            for row in rows
        ]
    rows.sort(key=lambda row: -row.simulated.throughput_tok_s)
    better = {row.policy: row for row in reversed(rows)}
    chosen = [row for row in rows if row.current or row is better[row.policy]]
    return Prospects(setting.mode, len(window.completed), setting.steps, tuple(chosen))


def _decode_steps(setting: Setting, policy: str, dispatch: Dispatch, seed: int) -> Prospect:
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
        step_time=setting.decode_time,
    )
    stream: Stream = TimedStream(job for job, _ in _in_a_circle(setting.window))
    if setting.mode == "full":
        rows = [part.lengths for part in setting.window.parts]
        stream = ClosedStream(cycle(rows), setting.clients)
    records = simulate(config, stream=stream, keep_records=True).records
    assert records is not None
    waited_s = config.step_time.per_token_s * (
        records.loads.max(axis=1, keepdims=True) - records.loads
    )
    return Prospect.of(policy, dispatch, records, waited_s, records.power_w(PowerModel()))


def _whole_engines(setting: Setting, policy: str, dispatch: Dispatch, seed: int) -> Prospect:
    """The engines cache prefixes where the recording tells what prompts share.

    Elsewhere they compute the share of each prompt that they computed in the recording.
    """
    window, cost = setting.window, setting.step_time
    block_tokens = window.block_tokens
    computed = window.computed_share if block_tokens is None else 1.0
    steps = setting.warmup + setting.steps
    requests = setting.clients + math.ceil(len(window.parts) * steps / window.steps)
    jobs = list(islice(_in_a_circle(window), requests))
    rows = tuple(
        TraceRequest(job.prompt_tokens, job.output_tokens, job.arrival_s, blocks, block_tokens or 1)
        for job, blocks in jobs
    )
    kv_tokens = _UNBOUNDED
    if block_tokens is not None:  # each recorded request fits
        told = [each.kv_tokens for each in window.workers if each.kv_tokens]
        longest = max(sum(part.lengths) for part in window.parts)
        kv_tokens = max(min(told, default=_UNBOUNDED), longest + block_tokens)
    full = setting.mode == "full"
    budget = math.ceil(int(window.prompts.max()) / computed)
    config = ServingConfig(
        policy=policy,
        trace=Trace("recorded", "recording", rows),
        arrivals=Arrivals(*(("closed", setting.clients) if full else ("trace", 1.0))),
        requests=requests,
        workers=setting.workers,
        slots=setting.slots,
        kv_tokens=kv_tokens,
        block_tokens=block_tokens or 1,
        batch_tokens=budget + setting.slots,
        prompt_budget=budget,
        step_time=replace(cost, per_prompt_token_s=computed * cost.per_prompt_token_s),
        dispatch=dispatch,
        dispatch_delay=_DELAY_STEPS if dispatch is Dispatch.POOL else 0,
        starvation_s=setting.starvation_s,
        warmup=setting.warmup / steps,
        seed=seed,
    )
    result = simulate_serving(config, keep_records=True)
    records = result.records
    assert records is not None
    waited_s = records.seconds[:, None] - records.needed_s
    work_s = np.maximum(records.needed_s - cost.base_s, 1e-12)
    watts = PowerModel().watts(work_s / work_s.max(axis=1, keepdims=True))
    row = Prospect.of(policy, dispatch, records, waited_s, watts)
    if block_tokens is None:
        return row
    return replace(row, caching=Caching(result.prefix_hit_share, result.ttft_mean_s))


def recorded_lengths(window: Window) -> TraceLengths:
    """The lengths of the window's engine requests."""
    rows = tuple(TraceRequest(*part.lengths) for part in window.parts)
    return TraceLengths.of(Trace("recorded", "recording", rows))


def _in_a_circle(window: Window) -> Iterator[tuple[Job, tuple[int, ...]]]:
    """Repeated without end; arrivals from before the window come at its end.

    With the numbers of the prompts' blocks, which are others in each turn.
    """
    length_s = window.elapsed_s
    timed = sorted(part._replace(arrival_s=part.arrival_s % length_s) for part in window.parts)
    others = 1 + max((number for part in timed for number in part.blocks), default=0)
    numbers = count()
    for turn in count():
        for at_s, lengths, blocks in timed:
            job = Job(next(numbers), *lengths, turn * length_s + at_s)
            yield job, tuple(turn * others + number for number in blocks)
