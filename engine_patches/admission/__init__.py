"""Admission to an engine under KV pressure: all policies by name.

Simulator, emulator and vLLM run the same policies. A new one is a class that implements
``Admission``, a row here, and a test.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from engine_patches.admission.lengths import MEDIAN, PredictedLengths, SeenLengths
from engine_patches.admission.policies.headroom import Headroom, Reserve
from engine_patches.admission.policies.memory_checked import MemoryChecked
from engine_patches.admission.policies.nested_wait import NestedWait
from engine_patches.admission.policies.off import Off
from engine_patches.admission.policies.strict import WARNING, StrictNestedWait, StrictWait
from engine_patches.admission.policies.wait import Wait
from engine_patches.admission.protocol import Admission
from engine_patches.admission.settings import (
    AdmissionError,
    AdmissionSettings,
    known_names,
    settings_from,
)
from engine_patches.admission.theory.passing import SEGMENTS, Passing, passing_shares

DEFAULT = "headroom"

_HEADROOM = ("headroom", "headroom_max", "adaptive")
_LENGTHS = ("predict", "length_margin")
_TYPES = ("thresholds", "segments")


@dataclass(frozen=True, slots=True)
class AdmissionRow:
    """``in_order``: it admits from the head of the engine's own order and skips no request."""

    make: Callable[[AdmissionSettings], Admission]
    summary: str
    keys: tuple[str, ...] = ()
    in_order: bool = False


def _reserve(settings: AdmissionSettings) -> Reserve:
    most = settings.headroom_max if settings.adaptive else settings.headroom
    return Reserve(settings.headroom, most)


def _lengths(settings: AdmissionSettings) -> PredictedLengths:
    return PredictedLengths(
        None if settings.predict == "cap" else SeenLengths(),
        share=settings.quantile() or MEDIAN,
        hints=settings.predict == "hint",
        margin=settings.length_margin,
        segments=settings.segments,
    )


def _wait(settings: AdmissionSettings) -> Admission:
    lengths = _lengths(settings) if settings.segments else None
    if settings.strict:
        return StrictWait(settings.thresholds, lengths)
    return Wait(_reserve(settings), settings.thresholds, settings.hold_s, lengths)


def _nested_wait(settings: AdmissionSettings) -> Admission:
    if settings.strict:
        return StrictNestedWait(settings.thresholds, settings.segments)
    passing = Passing(settings.segments or SEGMENTS, passing_shares(settings.rates))
    entries = settings.thresholds[0] if settings.thresholds else None
    return NestedWait(passing, entries, settings.delta)


ADMISSIONS: Mapping[str, AdmissionRow] = MappingProxyType(
    {
        "alpha_beta": AdmissionRow(
            lambda settings: Headroom(Reserve(settings.alpha, settings.alpha), "alpha_beta"),
            "a share alpha stays free; on overflow each request is cleared with probability beta",
            ("alpha", "beta"),
        ),
        "headroom": AdmissionRow(
            lambda settings: Headroom(_reserve(settings)),
            "the engine's order; a small share of the memory stays free of new requests",
            _HEADROOM,
            in_order=True,
        ),
        "memory_checked": AdmissionRow(
            lambda given: MemoryChecked(_lengths(given), given.margin, given.ageing),
            "the shortest first, while the memory suffices until all are predicted to have ended",
            (*_LENGTHS, "margin", "ageing"),
        ),
        "nested_wait": AdmissionRow(
            _nested_wait,
            "the next one, if it fits beside the expected growth of those that run",
            (*_TYPES, "rates", "delta", "strict"),
        ),
        "off": AdmissionRow(lambda _: Off(), "what the engine does by itself", in_order=True),
        "wait": AdmissionRow(
            _wait,
            "as headroom, and no more of a type in a step than arrive in one",
            (*_HEADROOM, *_TYPES, *_LENGTHS, "hold_s", "strict"),
        ),
    }
)


def read_admission(mapping: Mapping[str, object]) -> AdmissionSettings:
    """Parse a user's settings: ``{"policy": "headroom", "headroom": 0.05}``.

    AdmissionError: the policy or a key is unknown, or a value is invalid.
    """
    policy = mapping.get("policy", DEFAULT)
    if not isinstance(policy, str) or policy not in ADMISSIONS:
        raise AdmissionError(
            f"there is no policy {policy!r}; {known_names(str(policy), list(ADMISSIONS))}"
        )
    keys = ("policy", *ADMISSIONS[policy].keys)
    return settings_from({"policy": policy, **mapping}, keys)


def make_admission(settings: AdmissionSettings) -> Admission:
    """Build a policy for one engine; warn if it is ``strict``."""
    if settings.strict:
        warnings.warn(WARNING, stacklevel=2)
    return ADMISSIONS[settings.policy].make(settings)


def clearing_of(settings: AdmissionSettings) -> float:
    """Beta, the part of ``alpha_beta`` that the engine executes; 0 for other policies."""
    return settings.beta if "beta" in ADMISSIONS[settings.policy].keys else 0.0
