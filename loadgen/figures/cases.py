"""One case of a study: a simulation and how often it is repeated; how it is typed and cached."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache

from loadgen.figures.samples import Key
from loadgen.simulator.config import DecodeConfig, flag
from loadgen.simulator.lengths import LengthSource, TraceLengths
from loadgen.simulator.prefill import PrefillConfig
from loadgen.traces import BUNDLED, load_trace
from router.tuning import Parameters
from router.types import Dispatch

SEEDS = 5
PARAMETERS = tuple(each.name for each in fields(Parameters))


@dataclass(frozen=True, slots=True)
class Case:
    """One row of a study.

    Attributes:
        key: unlike all others of the study.
        config: what is simulated; its seed is replaced.
        seeds: repetitions, with the seeds 0, 1, ...
        before_refill: measure the imbalance before each refill of free slots as well.
        keep_records: keep every step of the first seed.
    """

    key: Key
    config: DecodeConfig
    seeds: int = SEEDS
    before_refill: bool = False
    keep_records: bool = False


@cache
def trace_lengths(name: str) -> TraceLengths:
    """Lengths of a bundled trace."""
    return TraceLengths.of(load_trace(name))


def settings(config: DecodeConfig) -> dict[str, object]:
    """Everything that a result depends on, but for the seed."""
    everything = config.described() | {name: getattr(config, name) for name in PARAMETERS}
    del everything["seed"]
    return everything


def differing(config: DecodeConfig) -> dict[str, object]:
    """Settings that are not the defaults."""
    default = settings(DecodeConfig(policy="bfio", lengths=config.lengths))
    required = {"policy": config.policy, "lengths": config.lengths.name}
    found = {name: value for name, value in settings(config).items() if value != default.get(name)}
    return required | found


def command_line(case: Case) -> str | None:
    """What repeats the first seed of a case; None where flags cannot say it."""
    config = case.config
    if config.known_profile is not None:
        return None
    default = DecodeConfig(policy="bfio", lengths=config.lengths)
    flags = [f"--policy {config.policy}", *_lengths_flag(config.lengths)]
    for name in _PLAIN_FLAGS:
        value = getattr(config, name)
        if value != getattr(default, name):
            shown = value.value if isinstance(value, Dispatch) else value
            flags.append(f"{flag(name)} {shown}")
    return " ".join(["evenstep simulate decode", *flags, *_composed_flags(config, default)])


_PLAIN_FLAGS = (
    *("workers", "slots", "pool", "steps", "warmup", *PARAMETERS),
    *("deadline_steps", "dispatch_delay", "overcommit", "kv_tokens", "arrivals", "dispatch"),
    "size_error",
)


def _lengths_flag(lengths: LengthSource) -> list[str]:
    if not isinstance(lengths, TraceLengths):
        return [f"--lengths {lengths.name}"]
    bundled = {path.name: name for name, path in BUNDLED.items()}
    return [f"--trace {shlex.quote(bundled.get(lengths.name, lengths.name))}"]


def _composed_flags(config: DecodeConfig, default: DecodeConfig) -> Iterator[str]:
    profile, time = config.profile, config.step_time
    if config.knowledge != default.knowledge:
        yield f"--lookahead {config.knowledge}"
    if profile.growth != default.profile.growth:
        yield f"--drift {profile.growth:g}"
    if profile.prefill_beta:
        yield f"--prefill-cost {profile.prefill_beta:g},{profile.prefill_chunk}"
    if time != default.step_time:
        yield f"--step-time {time.base_s:g},{time.per_token_s:g},{time.per_request_s:g}"
    if config.prefill is not None:
        yield from _prefill_flags(config.prefill)


def _prefill_flags(prefill: PrefillConfig) -> Iterator[str]:
    default = PrefillConfig(prefill.workers)
    time, transfer = prefill.time, prefill.transfer
    yield f"--prefill-workers {prefill.workers}"
    if time != default.time:
        yield f"--prefill-step-time {time.base_s:g},{time.per_token_s:g}"
    if prefill.chunk != default.chunk:
        yield f"--prefill-chunk {prefill.chunk}"
    if prefill.kv_tokens:
        yield f"--prefill-kv-tokens {prefill.kv_tokens}"
    if transfer != default.transfer:
        yield f"--kv-transfer-time {transfer.latency_s:g},{transfer.per_token_s:g}"


def with_seed(case: Case, seed: int) -> DecodeConfig:
    """The configuration of one repetition."""
    return replace(case.config, seed=seed)
