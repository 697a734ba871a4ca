"""Who enters an engine under KV pressure: all policies by name.

Simulator, emulator and vLLM run the same ones.

To add one: a class that is an ``Admission``, a row here, and a test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from engine_patches.admission.headroom import Headroom, Reserve
from engine_patches.admission.off import Off
from engine_patches.admission.policy import Admission
from engine_patches.admission.settings import AdmissionSettings, settings_from, unknown
from engine_patches.admission.wait import Wait

DEFAULT = "headroom"

_HEADROOM = ("headroom", "headroom_max", "adaptive")
_TYPES = ("thresholds", "segments")


@dataclass(frozen=True, slots=True)
class AdmissionRow:
    """A policy's maker, one line on it, and the settings that it has."""

    make: Callable[[AdmissionSettings], Admission]
    summary: str
    keys: tuple[str, ...] = ()


def _reserve(settings: AdmissionSettings) -> Reserve:
    most = settings.headroom_max if settings.adaptive else settings.headroom
    return Reserve(settings.headroom, most)


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
        ),
        "off": AdmissionRow(lambda _: Off(), "what the engine does by itself"),
        "wait": AdmissionRow(
            lambda settings: Wait(_reserve(settings), settings.thresholds, settings.hold_s),
            "as headroom, and no more of a type in a step than arrive in one",
            (*_HEADROOM, *_TYPES, "hold_s"),
        ),
    }
)


def read_admission(mapping: Mapping[str, object]) -> AdmissionSettings:
    """Settings as a user gives them: ``{"policy": "headroom", "headroom": 0.05}``.

    Raises:
        AdmissionError: no such policy, a key that it has not, or a value that cannot be used.
    """
    policy = mapping.get("policy", DEFAULT)
    if policy not in ADMISSIONS:
        raise unknown("policy", str(policy), list(ADMISSIONS))
    keys = ("policy", *ADMISSIONS[str(policy)].keys)
    return settings_from({"policy": policy, **mapping}, keys)


def make_admission(settings: AdmissionSettings) -> Admission:
    """A policy for one engine."""
    return ADMISSIONS[settings.policy].make(settings)
