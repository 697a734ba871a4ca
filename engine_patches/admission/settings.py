"""What an admission policy may be told, and the check of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from itertools import accumulate, pairwise

from engine_patches.admission.fluid import StepCost
from engine_patches.admission.thresholds import Segment, least_nested, nested_conditions

MAX_HOLD_S = 1.0
QUANTILE = "quantile:"


class AdmissionError(Exception):
    """Settings of admission that cannot be used; the message names the nearest that can."""


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """One policy's settings; ``read_admission`` knows which policy has which.

    Attributes:
        policy: its name.
        headroom: w, the share of KV memory that stays free when requests enter.
        headroom_max: up to which w rises while preemptions exceed 2 % of requests.
        adaptive: whether w follows the preemptions.
        predict: where output lengths come from: ``hint`` (the client's, else the median of those
            seen), ``cap`` (max_tokens), or ``quantile:Q`` of those seen.
        margin: share of KV memory that requests leave free, as they are predicted: (1 - margin) C.
        length_margin: added to each predicted length, a share of it: o_hat + delta.
        ageing: tokens of predicted length that a second of waiting counts for in the order.
        thresholds: n_j by type; none: measured.
        segments: output lengths that part the types, ascending; none: requests say their types.
        hold_s: how long a type may be held until n_j of it wait.
        strict: as printed, requests that run pause; for simulated engines.
        rates: requests per second, or their proportions, that end in each segment; none: measured.
        delta: probability with which those inside may come to need more memory than there is.
        alpha: share of KV memory that is protected from new requests.
        beta: probability with which a request is cleared when the memory overflows.

    Raises:
        AdmissionError: a value is out of its range.
    """

    policy: str = "headroom"
    headroom: float = 0.05
    headroom_max: float = 0.25
    adaptive: bool = True
    predict: str = "hint"
    margin: float = 0.0
    length_margin: float = 0.0
    ageing: float = 1.0
    thresholds: tuple[int, ...] = ()
    segments: tuple[int, ...] = ()
    hold_s: float = 0.0
    strict: bool = False
    rates: tuple[float, ...] = ()
    delta: float = 0.1
    alpha: float = 0.2
    beta: float = 0.2

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
            _check_counts(name, getattr(self, name))
        _check_types(self.thresholds, self.segments)
        _check_rates(self.rates, self.segments)
        if self.rates and self.thresholds:
            _check_ratios(self.thresholds, self.segments, self.rates)
        if self.strict:
            _check_strict(self)

    def quantile(self) -> float | None:
        """Q of ``quantile:Q``; None where lengths come from elsewhere.

        Raises:
            AdmissionError: ``predict`` is none of what it may be.
        """
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
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise AdmissionError(f"{name} must be a number, got {value!r}")
    if not least <= value <= most:
        nearest = min(max(value, least), most)
        raise AdmissionError(
            f"{name} {value} is not from {least:g} to {most:g}: the nearest is {nearest:g}"
        )


def _check_counts(name: str, values: object) -> None:
    if not isinstance(values, tuple):
        raise AdmissionError(f"{name} must be a list of whole numbers, got {values!r}")
    for value in values:
        if type(value) is not int or value < 1:
            raise AdmissionError(f"{name} must be whole numbers from 1 up, got {value!r}")


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


def _check_rates(rates: object, segments: Sequence[int]) -> None:
    if not isinstance(rates, tuple):
        raise AdmissionError(f"rates must be a list of numbers, got {rates!r}")
    for rate in rates:
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < math.inf:
            raise AdmissionError(f"rates must be numbers above 0, got {rate!r}")
    if rates and (not segments or len(rates) != len(segments) + 1):
        raise AdmissionError(
            f"rates: {len(rates)} of them, and segments {list(segments)}: give segments, and a "
            "rate for each and for what lies beyond the last"
        )


def passing_shares(rates: Sequence[float]) -> list[float]:
    """Of those that get to each segment but the last, the share that passes to the next."""
    tails = list(accumulate(reversed(rates)))[::-1]
    return [after / before for before, after in pairwise(tails)]


def _check_ratios(
    thresholds: Sequence[int], lengths: Sequence[int], rates: Sequence[float]
) -> None:
    """(12), but for n_1: whether that is enough for a step's arrivals, only the engine can tell."""
    bounds = pairwise((0, *lengths, lengths[-1] + 1))
    segments = [
        Segment(first, end - 1, sum(rates), share, 1.0)
        for (first, end), share in zip(bounds, (*passing_shares(rates), 0.0), strict=True)
    ]
    no_time = StepCost(0.0)
    if not all(each.holds for each in nested_conditions(thresholds, segments, no_time)):
        raise AdmissionError(
            f"thresholds {list(thresholds)}: each must be above the one before times the share of "
            "requests that passes to its segment, (12); the nearest are "
            f"{list(least_nested(segments, no_time, thresholds) or ())}"
        )


def _check_strict(settings: AdmissionSettings) -> None:
    needed = ("thresholds", "segments") if settings.policy == "nested_wait" else ("thresholds",)
    for name in needed:
        if not getattr(settings, name):
            raise AdmissionError(
                f"strict {settings.policy} needs {name}; evenstep fluid finds valid thresholds"
            )


def unknown(what: str, given: str, known: Sequence[str]) -> AdmissionError:
    """The error for a name that is none of those known."""
    nearest = get_close_matches(given, known, n=1)
    meant = f"; did you mean {nearest[0]}?" if nearest else ""
    return AdmissionError(f"{what} {given!r} is not known: {', '.join(known)}{meant}")


def settings_from(mapping: Mapping[str, object], keys: Sequence[str]) -> AdmissionSettings:
    """Settings of which only some may be given.

    Raises:
        AdmissionError: another one is given, or a value that cannot be used.
    """
    assert set(keys) <= {field.name for field in fields(AdmissionSettings)}
    values: dict[str, object] = {}
    for name, value in mapping.items():
        if name not in keys:
            raise unknown(f"key of {mapping['policy']}", str(name), keys)
        values[name] = tuple(value) if isinstance(value, list) else value
    return AdmissionSettings(**values)  # type: ignore[arg-type]
