"""Look-ahead in simulated decoding whose engines report what a real one did of its answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from loadgen.report.intervals import estimate
from loadgen.simulator.decode.barrier_decode import simulate
from loadgen.simulator.decode.decode_config import DecodeConfig
from loadgen.simulator.decode.decode_results import DecodeResult
from loadgen.simulator.decode.length_sources import TraceLengths
from loadgen.simulator.decode.oracle import Foreseen, Kind, Knowledge
from loadgen.traces.trace import Trace, TraceRequest
from router.core.forecast.end_signals import Departure, ProvenSignal, ReportedSignal, Signal
from router.core.forecast.forecast import Floats, Ints, Running, WorkProfile
from tests.support.recorded_ends import MOST_TOKENS, Answers

_Known = ReportedSignal | ProvenSignal
# What is known of coming ends, and a fixed horizon; None: the router's rule.
WAYS: Mapping[str, tuple[str, int | None]] = {
    "none": ("none", None),
    "learned lengths": ("learned lengths", None),
    "end signal": ("end signal", None),
    "auto": ("auto", None),
    "oracle": ("oracle", None),
    "learned lengths, 16 steps": ("learned lengths", 16),
    "end signal, 16 steps": ("end signal", 16),
}
_SIGNALS: Mapping[str, Callable[[WorkProfile], _Known]] = {
    "end signal": ReportedSignal,
    "auto": ProvenSignal,
}
_KINDS: Mapping[str, Kind] = {"none": "none", "learned lengths": "survival", "oracle": "oracle"}
SIZES: dict[str, Any] = {"workers": 16, "slots": 32, "steps": 4000, "warmup": 1000}


class Telling(Signal):
    """A signal of ``serve`` before requests that report what was recorded of such an answer."""

    def __init__(self, answers: Answers, signal: _Known) -> None:
        super().__init__()
        self._told = answers.told
        self._signal = signal
        keys = _keys(answers.prompt_tokens, answers.tokens)
        order = np.argsort(keys)
        self._keys, self._starts = keys[order], answers.starts[order]

    def follow(self, profile: WorkProfile) -> None:
        self._signal.follow(profile)

    def chances(self, running: Running, ahead: Ints) -> Floats:
        return self._signal.chances(self._reported(running), ahead)

    @property
    def stale(self) -> bool:
        return self._signal.stale

    def observe(self, running: Running) -> None:
        self._signal.observe(self._reported(running))

    def ended(self, departure: Departure) -> None:
        self._signal.ended(departure)

    def advance(self, steps: int) -> None:
        self._signal.advance(steps)

    def _reported(self, running: Running) -> Running:
        assert isinstance(running, Foreseen)
        made = running.generated_tokens
        keys = _keys(running.prompt_tokens, made + running.remaining)
        start = self._starts[np.searchsorted(self._keys, keys)]
        told = np.where(made > 0, self._told[start + np.maximum(made, 1) - 1], np.nan)
        return replace(running, end_probability=told)


def _keys(prompt_tokens: Ints, tokens: Ints) -> Ints:
    """One number for both."""
    keys: Ints = prompt_tokens * (MOST_TOKENS + 1) + tokens
    return keys


@dataclass(frozen=True, slots=True)
class Told(Knowledge):
    """Knowledge of a look-ahead, as ``WAYS`` has it."""

    way: str = ""
    answers: Answers | None = None

    def signal(self, profile: WorkProfile, seed: int) -> Signal:
        assert self.answers is not None
        known = _SIGNALS.get(self.way)
        if known is not None:
            return Telling(self.answers, known(profile))
        return Knowledge(_KINDS[self.way]).signal(profile, seed)


def gains(answers: Answers, seeds: int) -> dict[str, Any]:
    """Imbalance and tokens/s by way, as ratios to no look-ahead on the same seed.

    Returns:
        By way: mean, and the bounds of its 95 % interval over the seeds.
    """
    requests = [
        TraceRequest(prompt, tokens)
        for prompt, tokens in zip(
            answers.prompt_tokens.tolist(), answers.tokens.tolist(), strict=True
        )
    ]
    lengths = TraceLengths.of(Trace("recorded answers", "recording", tuple(requests)))
    found: dict[str, list[DecodeResult]] = {way: [] for way in WAYS}
    for seed in range(seeds):
        for way, (known, horizon) in WAYS.items():
            config = DecodeConfig(
                policy="bfio",
                lengths=lengths,
                seed=seed,
                knowledge=Told("none", 0.0, known, answers),
                horizon=horizon,
                **SIZES,
            )
            found[way].append(simulate(config))
    base = found["none"]
    ways = {way: _compared(runs, base) for way, runs in found.items()}
    return {"seeds": seeds, **SIZES, "ways": ways}


def _compared(runs: Sequence[DecodeResult], base: Sequence[DecodeResult]) -> dict[str, Any]:
    """Ratios to runs of the same seeds, and the skill and horizon at the end of each run."""
    pairs = list(zip(runs, base, strict=True))
    return {
        "imbalance": _interval([a.avg_imbalance_tokens / b.avg_imbalance_tokens for a, b in pairs]),
        "tokens_per_s": _interval([a.throughput_tok_s / b.throughput_tok_s for a, b in pairs]),
        "skills": [_rounded(run.parameters["skill"]) for run in runs],
        "horizons": [run.parameters["horizon"] for run in runs],
    }


def _rounded(skill: object) -> float | None:
    return round(skill, 3) if isinstance(skill, float) else None


def _interval(ratios: list[float]) -> list[float]:
    found = estimate(ratios)
    half = found.half_width or 0.0
    return [round(x, 4) for x in (found.mean, found.mean - half, found.mean + half)]
