from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from itertools import pairwise

from engine_patches.admission.theory.fluid import Flow
from engine_patches.admission.theory.thresholds import (
    Validity,
    nested_validity,
    segments_of,
    wait_validity,
)
from router.core.step_time import StepTime

MAX_HOLD_S = 1.0
QUANTILE = "quantile:"

# Sums stay exact below this bound; lengths stay below the assumed end of the last segment.
_MOST_TOKENS = 1_000_000
_RATES = (1e-9, 1e9)
_MOST_STEP_S = 1e9


class AdmissionError(Exception):
    """Invalid admission settings; the message names the nearest valid ones."""


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """One policy's settings; ``read_admission`` knows the keys of each policy.

    AdmissionError: a value is out of its range. Thresholds that violate (11), (12) or (16) for the
    given rates, lengths and step time are rejected; those on the edge, as some that the paper
    prints, cause a warning.
    """

    policy: str = "headroom"
    headroom: float = 0.05  # w, share of KV memory kept free when requests enter
    headroom_max: float = 0.25  # maximum of w, which rises while preemptions exceed 2 % of requests
    adaptive: bool = True  # whether w follows the preemptions
    # Source of output lengths: ``hint`` (the client's, else the median of those seen), ``cap``
    # (max_tokens), or ``quantile:Q`` of those seen.
    predict: str = "hint"
    margin: float = 0.0  # share of KV memory kept free at predicted lengths: (1 - margin) C
    length_margin: float = 0.0  # share added to each predicted length: o_hat + delta
    ageing: float = 1.0  # tokens of predicted length that one second of waiting offsets
    thresholds: tuple[int, ...] = ()  # n_j by type; empty: measured
    # Output lengths that separate the types, ascending; empty: requests carry theirs.
    segments: tuple[int, ...] = ()
    hold_s: float = 0.0  # longest time to hold a type until n_j of it wait
    strict: bool = False  # as printed in the paper, running requests pause; for simulated engines
    # Requests per second of each type, or that end in each segment; empty: measured. Without
    # ``step_time`` their proportions are enough.
    rates: tuple[float, ...] = ()
    # Mean prompt and output tokens of these types, to check thresholds.
    lengths: tuple[tuple[int, int], ...] = ()
    # d0, d1, and optionally seconds per request and per prompt token, to check thresholds.
    step_time: tuple[float, ...] = ()
    delta: float = 0.1  # probability that running requests will need more memory than there is
    alpha: float = 0.2  # share of KV memory protected from new requests
    beta: float = 0.2  # probability of clearing a request when the memory overflows

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            _check_range(name, getattr(self, name), least, most)
        for name in ("adaptive", "strict"):
            if not isinstance(getattr(self, name), bool):
                raise AdmissionError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if self.adaptive and self.headroom_max < self.headroom:
            raise AdmissionError(
                f"headroom_max {self.headroom_max} is below headroom: give {self.headroom} or more"
            )
        self.quantile()
        for name in ("thresholds", "segments"):
            _check_numbers(name, getattr(self, name), (1, _MOST_TOKENS), whole=True)
        _check_types(self.thresholds, self.segments)
        _check_flows(self)
        if self.strict:
            _check_strict(self)
        if self.rates and self.thresholds:
            found = _nested(self) if self.policy == "nested_wait" else _wait(self)
            if found.on_edge:
                warnings.warn(str(found), stacklevel=2)
            elif found.missed:
                raise AdmissionError(str(found))

    def quantile(self) -> float | None:
        """Q of ``quantile:Q``; None for other valid sources of lengths."""
        if self.predict in ("hint", "cap"):
            return None
        try:
            share = float(self.predict.removeprefix(QUANTILE))
        except (ValueError, AttributeError):
            share = math.nan
        if not 0 < share < 1:
            raise AdmissionError(
                f"predict {self.predict!r}: give hint, cap or quantile:Q with Q between 0 and 1"
            )
        return share


_RANGES: Mapping[str, tuple[float, float]] = {
    "headroom": (0.0, 0.5),
    "headroom_max": (0.0, 0.9),
    "margin": (0.0, 0.9),
    "length_margin": (0.0, 10.0),
    "ageing": (0.0, 1e6),
    "hold_s": (0.0, MAX_HOLD_S),
    "delta": (1e-6, 0.9),
    "alpha": (0.0, 0.9),
    "beta": (0.001, 1.0),
}


def _check_range(name: str, value: object, least: float, most: float) -> None:
    is_nan = isinstance(value, float) and math.isnan(value)  # integers may be too large for isnan
    if isinstance(value, bool) or not isinstance(value, int | float) or is_nan:
        raise AdmissionError(f"{name} must be a number, got {value!r}")
    if not least <= value <= most:
        nearest = min(max(value, least), most)
        raise AdmissionError(
            f"{name} {value} is not from {least:g} to {most:g}: the nearest is {nearest:g}"
        )


def _check_types(thresholds: Sequence[int], segments: Sequence[int]) -> None:
    ascending = sorted(set(segments))
    if list(segments) != ascending:
        raise AdmissionError(f"segments must ascend: give {ascending} for {list(segments)}")
    if thresholds and segments and len(thresholds) != len(segments) + 1:
        nearest = [*thresholds, *(thresholds[-1] for _ in segments)][: len(segments) + 1]
        raise AdmissionError(
            f"{len(segments)} segments part {len(segments) + 1} types, thresholds has "
            f"{len(thresholds)}: the nearest is {nearest}"
        )


def _check_flows(settings: AdmissionSettings) -> None:
    rates, lengths, step_time = settings.rates, settings.lengths, settings.step_time
    _check_numbers("rates", rates, _RATES)
    _check_numbers("step_time", step_time, (0.0, _MOST_STEP_S))
    if not isinstance(lengths, tuple) or not all(map(_is_length, lengths)):
        raise AdmissionError(
            "lengths must be a list of [prompt, output] tokens, whole numbers from 1 to "
            f"{_MOST_TOKENS}, got {lengths!r}"
        )
    if step_time and not (2 <= len(step_time) <= 4 and step_time[0] > 0):
        raise AdmissionError(
            f"step_time must be [d0, d1], seconds a step and per KV token, or these and seconds "
            f"per request and per prompt token, d0 above 0; got {list(step_time)}"
        )
    nested = settings.policy == "nested_wait"
    if rates and (settings.segments or nested):
        _check_segments(rates, lengths, settings.segments)
    told = (lengths, step_time) if nested else (rates, lengths, step_time)
    if any(told) and not all((*told, settings.thresholds)):
        names = "lengths and step_time" if nested else "rates, lengths and step_time"
        raise AdmissionError(f"{names} check thresholds: give all of these, or none")
    if lengths and len(lengths) != len(rates):
        raise AdmissionError(f"{len(lengths)} lengths for {len(rates)} rates: give one for each")


def _check_segments(
    rates: Sequence[float], lengths: Sequence[tuple[int, int]], segments: Sequence[int]
) -> None:
    if not segments or len(rates) != len(segments) + 1:
        raise AdmissionError(
            f"rates: {len(rates)} of them, and segments {list(segments)}: give segments, and a "
            "rate for each and for what lies beyond the last"
        )
    bounds = pairwise((0, *segments, math.inf))
    for (_, output), (above, last) in zip(lengths, bounds, strict=False):
        if not above < output <= last:
            raise AdmissionError(
                f"lengths: {output} output tokens are not above {above} and up to {last}, where "
                "their segment is"
            )


def _check_numbers(
    name: str, values: object, bounds: tuple[float, float], *, whole: bool = False
) -> None:
    what = "whole numbers" if whole else "numbers"
    if not isinstance(values, tuple):
        raise AdmissionError(f"{name} must be a list of {what}, got {values!r}")
    for value in values:
        number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if not number or not bounds[0] <= value <= bounds[1]:
            limits = f"from {bounds[0]:.7g} to {bounds[1]:.7g}"
            raise AdmissionError(f"{name} must be {what} {limits}, got {value!r}")


def _is_length(value: object) -> bool:
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    return all(type(tokens) is int and 1 <= tokens <= _MOST_TOKENS for tokens in value)


def _wait(settings: AdmissionSettings) -> Validity:
    flows, given = _flows(settings), settings.thresholds
    if len(given) > len(flows):
        raise AdmissionError(
            f"{len(given)} thresholds for {len(flows)} rates: the nearest is "
            f"{list(given[: len(flows)])}"
        )
    each = [*given, *[given[-1]] * (len(flows) - len(given))]
    return wait_validity(each, flows, StepTime(*settings.step_time))


def _nested(settings: AdmissionSettings) -> Validity:
    """Evaluate (12) or (16); without a step time all but the condition on n_1."""
    segments = settings.segments
    flows = _flows(settings) or [
        Flow(rate, 1.0, output - 1)
        for rate, output in zip(settings.rates, (*segments, segments[-1] + 1), strict=True)
    ]
    last_stages = [*(end - 1 for end in segments), flows[-1].decode_steps]
    cost = StepTime(*settings.step_time or (0.0,))
    return nested_validity(settings.thresholds, segments_of(flows, last_stages), cost)


def _flows(settings: AdmissionSettings) -> list[Flow]:
    return [
        Flow(rate, prompt, output - 1)
        for rate, (prompt, output) in zip(settings.rates, settings.lengths, strict=False)
    ]


def _check_strict(settings: AdmissionSettings) -> None:
    needed = ("thresholds", "segments") if settings.policy == "nested_wait" else ("thresholds",)
    for name in needed:
        if not getattr(settings, name):
            raise AdmissionError(
                f"strict {settings.policy} needs {name}; evenstep fluid finds valid thresholds"
            )


def known_names(given: str, known: Sequence[str]) -> str:
    """End of an error message: the nearest match and the known names."""
    nearest = get_close_matches(given.lower(), known, n=1)
    meant = f"; did you mean {nearest[0]}?" if nearest else ""
    return f"known: {', '.join(known)}{meant}"


def settings_from(mapping: Mapping[str, object], keys: Sequence[str]) -> AdmissionSettings:
    """Build settings; AdmissionError: a key is not allowed, or a value is invalid."""
    assert set(keys) <= {field.name for field in fields(AdmissionSettings)}
    for name in mapping:
        if name not in keys:
            raise AdmissionError(
                f"{mapping['policy']} has no key {name!r}; {known_names(str(name), keys)}"
            )
    return AdmissionSettings(**{name: _frozen(value) for name, value in mapping.items()})  # type: ignore[arg-type]


def _frozen(value: object) -> object:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value
