from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Annotated

from msgspec import Meta, ValidationError, convert

from router.core.step_time import number_in

MAX_HOLD_S = 1.0
QUANTILE = "quantile:"

# Sums stay exact below this bound; lengths stay below the assumed end of the last segment.
_Tokens = Annotated[int, Meta(ge=1, le=1_000_000)]
_Rate = Annotated[float, Meta(ge=1e-9, le=1e9)]


class AdmissionError(Exception):
    """Invalid admission settings; the message names the nearest valid ones."""


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """One policy's settings; ``read_admission`` knows the keys of each policy.

    AdmissionError: a value is out of its range. ``evenstep fluid`` checks thresholds.
    """

    policy: str = "headroom"
    # w, share of KV memory kept free when requests enter.
    headroom: Annotated[float, Meta(ge=0, le=0.5)] = 0.05
    # Maximum of w, which rises while preemptions exceed 2 % of requests.
    headroom_max: Annotated[float, Meta(ge=0, le=0.9)] = 0.25
    adaptive: bool = True  # whether w follows the preemptions
    # Source of output lengths: ``hint`` (the client's, else the median of those seen), ``cap``
    # (max_tokens), or ``quantile:Q`` of those seen.
    predict: str = "hint"
    # Share of KV memory kept free at predicted lengths: (1 - margin) C.
    margin: Annotated[float, Meta(ge=0, le=0.9)] = 0.0
    # Share added to each predicted length: o_hat + delta.
    length_margin: Annotated[float, Meta(ge=0, le=10)] = 0.0
    # Tokens of predicted length that one second of waiting offsets.
    ageing: Annotated[float, Meta(ge=0, le=1e6)] = 1.0
    thresholds: tuple[_Tokens, ...] = ()  # n_j by type; empty: measured
    # Output lengths that separate the types, ascending; empty: requests carry theirs.
    segments: tuple[_Tokens, ...] = ()
    # Longest time to hold a type until n_j of it wait.
    hold_s: Annotated[float, Meta(ge=0, le=MAX_HOLD_S)] = 0.0
    strict: bool = False  # as printed in the paper, running requests pause; for simulated engines
    # Proportions of the requests that end in each segment; empty: measured.
    rates: tuple[_Rate, ...] = ()
    # Probability that running requests will need more memory than there is.
    delta: Annotated[float, Meta(ge=1e-6, le=0.9)] = 0.1
    # Share of KV memory protected from new requests.
    alpha: Annotated[float, Meta(ge=0, le=0.9)] = 0.2
    # Probability of clearing a request when the memory overflows.
    beta: Annotated[float, Meta(ge=0.001, le=1)] = 0.2

    def __post_init__(self) -> None:
        if self.adaptive and self.headroom_max < self.headroom:
            raise AdmissionError(
                f"headroom_max {self.headroom_max} is below headroom: give {self.headroom} or more"
            )
        self.quantile()
        _check_types(self.thresholds, self.segments)
        _check_rates(self.rates, self.segments)
        if self.strict:
            _check_strict(self)

    def quantile(self) -> float | None:
        """Q of ``quantile:Q``; None for other valid sources of lengths."""
        if self.predict in ("hint", "cap"):
            return None
        share = number_in(self.predict.removeprefix(QUANTILE))
        if not 0 < share < 1:
            raise AdmissionError(
                f"predict {self.predict!r}: give hint, cap or quantile:Q with Q between 0 and 1"
            )
        return share


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
    if rates and (not segments or len(rates) != len(segments) + 1):
        raise AdmissionError(
            f"rates: {len(rates)} of them, and segments {list(segments)}: give segments, and a "
            "rate for each and for what lies beyond the last"
        )


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
    try:
        return convert(mapping, AdmissionSettings)
    except ValidationError as error:
        problem, _, place = str(error).partition(" - at `$.")
        raise AdmissionError(f"{place.rstrip('`')}: {problem}") from None
