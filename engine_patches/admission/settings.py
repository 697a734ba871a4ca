from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches

MAX_HOLD_S = 1.0
QUANTILE = "quantile:"

# Sums stay exact below this bound; lengths stay below the assumed end of the last segment.
_MOST_TOKENS = 1_000_000
_RATES = (1e-9, 1e9)


class AdmissionError(Exception):
    """Invalid admission settings; the message names the nearest valid ones."""


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """One policy's settings; ``read_admission`` knows the keys of each policy.

    AdmissionError: a value is out of its range. ``evenstep fluid`` checks thresholds.
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
    # Proportions of the requests that end in each segment; empty: measured.
    rates: tuple[float, ...] = ()
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
        _check_rates(self.rates, self.segments)
        if self.strict:
            _check_strict(self)

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


def _check_rates(rates: Sequence[float], segments: Sequence[int]) -> None:
    _check_numbers("rates", rates, _RATES)
    if rates and (not segments or len(rates) != len(segments) + 1):
        raise AdmissionError(
            f"rates: {len(rates)} of them, and segments {list(segments)}: give segments, and a "
            "rate for each and for what lies beyond the last"
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
