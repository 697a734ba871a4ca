"""The plug-in's settings: ``--additional-config '{"evenstep": {"snapshots": "tcp://…"}}'``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from engine_patches.admission import clearing_of, read_admission
from engine_patches.admission.settings import AdmissionError, AdmissionSettings, known_names
from router.core.wire import is_curve_key, is_local

KEY = "evenstep"
"""Where the settings lie in vLLM's ``--additional-config``."""

PORTS_PER_RANK = 2
"""One for the stream, the next one for full snapshots."""

_EXAMPLE = '{"evenstep": {"snapshots": "tcp://127.0.0.1:5600"}}'


class PlugInError(Exception):
    """The engine cannot start with the plug-in; the message has the remedy."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the plug-in."""

    snapshots: str  # endpoint of rank 0's state stream, ``tcp://HOST:PORT`` or ``ipc://PATH``
    group: str = "default"  # as in the router's ``--worker``
    worker: str = ""  # the worker's name; "": group and rank
    secret_key_file: str | None = None  # the engine's CURVE key pair, as ``zmq.auth`` writes it
    allowed_keys: tuple[str, ...] = ()  # public CURVE keys of the routers that may read
    # Report each request's probability of ending; also needs the logits processor
    # ``engine_patches.end_signal:EndSignal``.
    end_signal: bool = False
    # Let routers bound the prompt tokens of each step; without effect unless all ranks of a
    # data-parallel group have it. None: where this engine can cut prompts into pieces.
    prompt_budget: bool | None = None
    admission: AdmissionSettings | None = None  # policy under KV pressure; None: vLLM decides alone

    @property
    def secured(self) -> bool:
        return self.secret_key_file is not None

    def endpoint(self, rank: int) -> str:
        """Of a rank's stream; each rank takes the next two ports. PlugInError: no port is left."""
        if not self.snapshots.startswith("tcp://"):
            return f"{self.snapshots}.{rank}" if rank else self.snapshots
        host, _, port = self.snapshots.rpartition(":")
        number = int(port) + PORTS_PER_RANK * rank
        if number >= 65535:
            raise PlugInError(f"{KEY}.snapshots: no port is left for rank {rank}; take a lower one")
        return f"{host}:{number}"

    def name(self, rank: int) -> str:
        return self.worker or f"{self.group}-{rank}"


def read_settings(additional_config: object) -> Settings:
    """Read the plug-in's part of vLLM's ``additional_config``.

    PlugInError: it is missing, or has unknown keys or invalid values.
    """
    part = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
    if not isinstance(part, Mapping):
        raise PlugInError(f"the plug-in needs its settings: --additional-config '{_EXAMPLE}'")
    known = [field.name for field in fields(Settings)]
    if unknown := sorted(str(key) for key in part if key not in known):
        named = ", ".join(map(repr, unknown))
        raise PlugInError(f"{KEY} has no key {named}; {known_names(unknown[0], known)}")
    for key, value in part.items():
        fits, wanted = _TYPES.get(key, _TEXT)
        if not fits(value):
            raise PlugInError(f"{KEY}.{key} must be {wanted}, got {value!r}")
    if "snapshots" not in part:
        raise PlugInError(f"{KEY}.snapshots is missing: the endpoint of the state stream")
    keys = tuple(part.get("allowed_keys", ()))
    admission = _admission(part["admission"]) if "admission" in part else None
    settings = Settings(**{**part, "allowed_keys": keys, "admission": admission})
    _check_endpoint(settings.snapshots)
    _check_security(settings)
    return settings


def _admission(part: Mapping[str, object]) -> AdmissionSettings:
    try:
        settings = read_admission(part)
    except AdmissionError as error:
        raise PlugInError(f"{KEY}.admission: {error}") from None
    if clearing_of(settings) or settings.strict:
        what = "strict" if settings.strict else settings.policy
        raise PlugInError(
            f"{KEY}.admission: {what} takes requests out of the batch, which vLLM cannot; it is "
            "for simulated and emulated engines. Take headroom, or wait without strict"
        )
    return settings


def _is_curve_key(value: object) -> bool:
    return isinstance(value, str) and is_curve_key(value)


_TEXT = (lambda value: isinstance(value, str) and bool(value), "a text")
_SWITCH = (lambda value: isinstance(value, bool), "true or false")
_TYPES: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "admission": (lambda value: isinstance(value, Mapping), 'like {"policy": "headroom"}'),
    "allowed_keys": (
        lambda value: isinstance(value, list | tuple) and all(map(_is_curve_key, value)),
        "a list of public CURVE keys of 40 characters of ZMQ's alphabet (Z85)",
    ),
    "end_signal": _SWITCH,
    "prompt_budget": _SWITCH,
}


def _check_endpoint(endpoint: str) -> None:
    scheme, separator, address = endpoint.partition("://")
    if not separator or scheme not in ("tcp", "ipc") or not address:
        raise PlugInError(f"{KEY}.snapshots must be tcp://HOST:PORT or ipc://PATH, got {endpoint}")
    if scheme == "ipc":
        return
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 65535:
        raise PlugInError(
            f"{KEY}.snapshots needs a host and a port from 1 to 65534, got {endpoint}"
        )


def _check_security(settings: Settings) -> None:
    if settings.secured != bool(settings.allowed_keys):
        raise PlugInError(f"{KEY}.secret_key_file and {KEY}.allowed_keys go together: give both")
    if not settings.secured and not is_local(settings.snapshots):
        raise PlugInError(
            f"{KEY}.snapshots {settings.snapshots} can be reached from other machines: give "
            f"{KEY}.secret_key_file and {KEY}.allowed_keys (CURVE), or bind it to 127.0.0.1"
        )
