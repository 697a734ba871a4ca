"""The diagnosed part of a recording: one group's steps as arrays, and its requests."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from router.core.energy.joules import PowerLevels
from router.core.errors import ConfigError, InputError
from router.core.forecast.forecast import Floats, Ints
from router.core.types import Dispatch, Outcome
from router.recording.lines import PolicyLine, RecordedWorker, Recording, RequestLine, StepLine

Flags = NDArray[np.bool_]

# Share of the prompts' blocks that have numbers, from which on their hits can be simulated.
_NUMBERED = 0.9


@dataclass(frozen=True, slots=True)
class Span:
    """Part of a recording; seconds of the recording's clock."""

    start_s: float = 0.0  # to skip from the first line on
    seconds: float = math.inf
    time_scale: float = 1.0  # wall seconds per engine second, as in ``evenstep emulate``
    listened_s: float | None = None  # time that the recorder listened; None: taken from the lines


@dataclass(frozen=True, slots=True)
class PolicyChange:
    """A change of the policy in force, ``after_s`` wall seconds into the span."""

    after_s: float
    policy: str | None
    dispatch: Dispatch | None


class Part(NamedTuple):
    """An engine request.

    ``lengths``: tokens of prompt and output; ``blocks``: numbers of the prompt's blocks, if known.
    """

    arrival_s: float
    lengths: tuple[int, int]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """S steps of a group of G workers; times are engine seconds since the window's start.

    Steps that took no time, or in which no worker counts, are left out.
    """

    group: str
    others: tuple[str, ...]
    source: str  # ``serve`` or ``observe``
    # policy, dispatch: in force; None: another router balanced.
    policy: str | None
    dispatch: Dispatch | None
    # Policy changes in the span; the window begins with the last one.
    changes: tuple[PolicyChange, ...]
    levels: PowerLevels | None  # calibrated power levels of a worker's GPUs
    workers: tuple[RecordedWorker, ...]
    elapsed_s: float
    time_scale: float
    # end_s, step_s: shape (S,), end and duration of each step.
    end_s: Floats
    step_s: Floats
    loads: Ints  # shape (S, G), KV tokens; 0 for workers that do not count
    counted: Flags  # shape (S, G), whether a worker counts: it is up and reports its state
    running: Ints
    prompts: Ints  # shape (S, G), prompt tokens computed in the step; 0 if the recording has none
    tokens: Ints  # shape (S,), output tokens; in recordings without them, the running requests
    # pool, queued: shape (S,), requests waiting in the router, and in the engines.
    pool: Ints
    queued: Ints
    together: Flags  # shape (S,), whether all busy workers made the step together
    # Shape (S,), time waited for the fullest worker, timed by engines; NaN: not timed.
    waited_s: Floats
    power_w: Floats  # shape (S, G), NaN where unknown
    preemptions: int
    # Requests that ended in the window, by arrival; their dispatch does not use the window's clock.
    requests: tuple[RequestLine, ...]
    # Whether the recording has all its lines; False also if it breaks off within one.
    complete: bool

    @property
    def steps(self) -> int:
        return len(self.step_s)

    @property
    def completed(self) -> list[RequestLine]:
        return [
            each
            for each in self.requests
            if each.outcome == Outcome.COMPLETED.value and each.output_tokens > 0
        ]

    @property
    def parts(self) -> list[Part]:
        """Engine requests of the completed ones."""
        return [
            Part(each.arrival_s, (each.prompt_tokens, output_tokens), blocks)
            for each in self.completed
            for blocks in [tuple(each.block_numbers)]
            for output_tokens in each.outputs
        ]

    @property
    def slots_per_request(self) -> float:
        return (
            sum(each.slots for each in self.requests) / len(self.requests) if self.requests else 1
        )

    @property
    def peak_tokens(self) -> Ints:
        """Shape (S,): max L."""
        peak: Ints = self.loads.max(axis=1)
        return peak

    @property
    def imbalance_tokens(self) -> Ints:
        """Shape (S,): G max L - sum L over the workers that count."""
        imbalance: Ints = self.counted.sum(axis=1) * self.peak_tokens - self.loads.sum(axis=1)
        return imbalance

    @property
    def computed_share(self) -> float:
        """Prompt tokens that the workers computed, over those of the requests that began to answer.

        0: prompts are computed elsewhere. Below 1, prefix caches had the rest.
        """
        prompts = sum(
            each.prompt_tokens for each in self.requests if each.output_tokens for _ in each.outputs
        )
        return min(1.0, float(self.prompts.sum()) / prompts) if prompts else 0.0

    @property
    def block_tokens(self) -> int | None:
        """Size of the blocks in ``parts``; None: most prompts have none, or their sizes differ."""
        sizes = {each.block_tokens for each in self.workers if each.block_tokens}
        if len(sizes) != 1:
            return None
        (size,) = sizes
        parts = self.parts
        whole = sum(part.lengths[0] // size for part in parts)
        known = sum(len(part.blocks) for part in parts)
        return size if whole and known >= _NUMBERED * whole else None

    @property
    def worker_seconds(self) -> float:
        return float(self.counted.sum(axis=1) @ self.step_s)


def window_of(recording: Recording, span: Span, group: str | None = None) -> Window:
    """Cut a group's window out of a recording; by default the busiest group's.

    ConfigError: there is no such group, or the recording has nothing in the span.
    """
    header = recording.header
    name = _busiest(recording) if group is None else group
    if name not in header.groups:
        raise ConfigError(
            f"--group {group!r} was not recorded; give one of {', '.join(header.groups)}"
        )
    if not header.groups[name].workers:
        raise InputError(f"group {name} has no workers in the recording; record one that has some")
    span_s, end_s = _extent(recording, span)
    first, changes, begin_s = _changes(recording, span_s, end_s)
    steps = [s for s in recording.steps if s.group == name and begin_s <= s.time_s <= end_s]
    steps = [s for s in steps if s.step_s > 0 and s.loads.count(None) < len(s.loads)]
    requests = [r for r in recording.requests if r.group == name and begin_s <= r.ended_s <= end_s]
    lasted_s = end_s - begin_s
    if span.listened_s is not None:
        lasted_s = max(0.0, span.listened_s - (begin_s - span_s))
    return Window(
        group=name,
        others=tuple(each for each in header.groups if each != name),
        source=header.source,
        policy=first.policy,
        dispatch=_dispatch(first.dispatch),
        changes=changes,
        levels=PowerLevels(*header.power_levels) if header.power_levels else None,
        workers=header.groups[name].workers,
        elapsed_s=lasted_s / span.time_scale,
        time_scale=span.time_scale,
        preemptions=sum(each.preemptions for each in steps),
        requests=tuple(
            msgspec.structs.replace(
                each,
                arrival_s=(each.arrival_s - begin_s) / span.time_scale,
                first_token_s=None
                if each.first_token_s is None
                else (each.first_token_s - begin_s) / span.time_scale,
                ended_s=(each.ended_s - begin_s) / span.time_scale,
            )
            for each in sorted(requests, key=lambda each: each.arrival_s)
        ),
        complete=recording.complete and not recording.dropped,
        end_s=np.array([(s.time_s - begin_s) / span.time_scale for s in steps]),
        **_columns(steps, len(header.groups[name].workers)),
    )


def _changes(
    recording: Recording, begin_s: float, end_s: float
) -> tuple[PolicyLine, tuple[PolicyChange, ...], float]:
    """The policy at the end of a span, its changes in the span, and the time of the last change."""
    header, changes, since_s = recording.header, [], begin_s
    in_force = PolicyLine(0.0, header.policy, header.dispatch)
    for each in recording.changes:
        if begin_s < each.changed_s <= end_s:
            until = in_force.policy, _dispatch(in_force.dispatch)
            changes.append(PolicyChange(each.changed_s - begin_s, *until))
            since_s = each.changed_s
        if each.changed_s <= end_s:
            in_force = each
    return in_force, tuple(changes), since_s


def _extent(recording: Recording, span: Span) -> tuple[float, float]:
    scale = span.time_scale
    ends_s = [(step.time_s, scale * step.step_s) for step in recording.steps]
    ends_s += [(request.ended_s, 0.0) for request in recording.requests]
    if not ends_s:
        return 0.0, 0.0
    first_s = min(at_s - lasted_s for at_s, lasted_s in ends_s)
    last_s = max(ends_s)[0]
    begin_s = first_s + span.start_s
    if begin_s > last_s:
        raise ConfigError(
            f"--start {span.start_s:g}: the recording ends after {last_s - first_s:.1f} s; give a "
            "lower one"
        )
    return begin_s, min(last_s, begin_s + span.seconds)


def _busiest(recording: Recording) -> str:
    """The group with the most tokens; without tokens, the first."""
    tokens = dict.fromkeys(recording.header.groups, 0)
    for step in recording.steps:
        tokens[step.group] += sum(filter(None, step.running))
    if not tokens:
        raise InputError("the recording has no group of workers; record a router that has some")
    return max(tokens, key=tokens.__getitem__)


def _dispatch(name: str | None) -> Dispatch | None:
    try:
        return None if name is None else Dispatch(name)
    except ValueError:
        raise InputError(
            f"the recording's dispatch {name!r} is unknown; record anew with this evenstep"
        ) from None


def _columns(steps: Sequence[StepLine], workers: int) -> dict[str, Any]:
    shape = (len(steps), workers)
    loads = _filled([each.loads for each in steps], shape)
    counted = ~np.isnan(loads)
    unknown = [None] * workers
    running = _counts([each.running for each in steps], shape)
    told = [each.tokens for each in steps]
    return {
        "step_s": np.array([each.step_s for each in steps], dtype=np.float64),
        "loads": np.nan_to_num(loads).astype(np.int64),
        "counted": counted,
        "running": running,
        "tokens": running.sum(axis=1) if None in told else np.array(told, dtype=np.int64),
        "prompts": _counts([each.prompts or unknown for each in steps], shape),
        "pool": np.array([each.pool for each in steps], dtype=np.int64),
        "queued": np.array([each.queued for each in steps], dtype=np.int64),
        "together": np.array([each.together for each in steps], dtype=np.bool_),
        "waited_s": _filled([[each.waited_s] for each in steps], (len(steps), 1))[:, 0],
        "power_w": _filled([each.power_w or unknown for each in steps], shape),
    }


def _counts(rows: Sequence[Sequence[float | None]], shape: tuple[int, int]) -> Ints:
    return np.nan_to_num(_filled(rows, shape)).astype(np.int64)


def _filled(rows: Sequence[Sequence[float | None]], shape: tuple[int, int]) -> Floats:
    values = [math.nan if value is None else value for row in rows for value in row]
    return np.array(values, dtype=np.float64).reshape(shape)
