"""Sources of settings: flags, ``EVENSTEP_*`` variables, a TOML file, defaults.

The first source that gives a setting wins. An unknown name is an error in each source.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from router.access.key_files import KEYS_VARIABLE
from router.config.balancing_settings import REPLACED
from router.config.given_files import read_toml
from router.config.serve_settings import SETTINGS, ServeSettings
from router.config.setting import range_of
from router.config.worker_notation import complaint, unknown
from router.core.errors import ConfigError

PREFIX = "EVENSTEP_"
CONFIG_VARIABLE = "EVENSTEP_CONFIG"

# Variables that are no settings: the command line's and deploy/engine's. Keys are never printed.
_OTHER_VARIABLES = {
    *(CONFIG_VARIABLE, "EVENSTEP_CACHE", KEYS_VARIABLE),
    *("EVENSTEP_ADMIN_URL", "EVENSTEP_ADMIN_KEY"),
}

# Kubernetes sets such variables in every pod for a service named evenstep, even EVENSTEP_PORT.
_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT)(_\w+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?$")
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://")


class _Source(NamedTuple):
    values: Mapping[str, object]
    name: Callable[[str], str]


def flag_name(setting: str) -> str:
    """A time drops the suffix ``_s``, a rate keeps ``_per_s``."""
    if setting == "workers":
        return "--worker"
    shown = setting if setting.endswith("_per_s") else setting.removesuffix("_s")
    return f"--{shown.replace('_', '-')}"


def load_settings(flags: Mapping[str, object], config: Path | None = None) -> ServeSettings:
    """Merge flags, environment, file and defaults; a ConfigError names setting and source."""
    in_file: dict[str, object] = {}
    if config is not None:
        in_file = read_toml(config)
        _check_names(in_file, str(config))
    sources = (
        _Source(flags, flag_name),
        _Source(_from_environment(), lambda setting: PREFIX + setting.upper()),
        _Source(in_file, lambda _: str(config)),
    )
    merged = {name: v for source in reversed(sources) for name, v in source.values.items()}
    try:
        return ServeSettings(**merged)  # type: ignore[arg-type]
    except ValidationError as invalid:
        raise ConfigError(_explain(invalid.errors()[0], sources)) from None


def changed(settings: ServeSettings, values: Mapping[str, object]) -> ServeSettings:
    """A copy with some values replaced; ConfigError: one is invalid by itself or with others."""
    _check_names(values, "the change")
    every = {name: getattr(settings, name) for name in SETTINGS}
    try:
        return ServeSettings(**{**every, **values})
    except ValidationError as invalid:
        given = _Source(values, lambda _: "the change")
        in_force = _Source(every, lambda _: "the settings in force")
        raise ConfigError(_explain(invalid.errors()[0], (given, in_force))) from None


def to_toml(settings: ServeSettings) -> str:
    """A TOML file that loads back to the settings."""
    plain = settings.model_dump(mode="json", exclude={"workers"})
    lines = [
        f"# {name} = (unset)" if value is None else f"{name} = {_toml_value(value)}"
        for name, value in plain.items()
    ]
    for worker in settings.workers:
        lines += ["", "[[workers]]"]
        table = asdict(worker).items()
        lines += [f"{key} = {_toml_value(value)}" for key, value in table if value is not None]
    return "\n".join(lines) + "\n"


def _explain(error: ErrorDetails, sources: Iterable[_Source]) -> str:
    setting = str(error["loc"][0])
    where = next((f" (from {s.name(setting)})" for s in sources if setting in s.values), "")
    if error["type"] == "value_error":
        return f"{complaint(error)}{where}"
    allowed = ""
    if limits := range_of(SETTINGS[setting]):
        allowed = f"; {limits[0]:,} to {limits[1]:,} is allowed"
    return f"{setting} = {error['input']!r} {complaint(error)}{where}{allowed}"


def _from_environment() -> dict[str, str]:
    """Texts by setting; an empty variable is none."""
    ours = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
    links = {
        name
        for name, value in ours.items()
        if _SERVICE_LINK.search(name) or (name.endswith("_PORT") and _SERVICE_ADDRESS.match(value))
    }
    known = {PREFIX + setting.upper() for setting in SETTINGS} | _OTHER_VARIABLES
    for name in ours:
        if (old := name.removeprefix(PREFIX).lower()) in REPLACED:
            raise ConfigError(replaced(old, name))
        if name not in known | links:
            raise ConfigError(unknown("environment variable", name, known))
    given = {name.upper(): v for name, v in os.environ.items() if v and name not in links}
    return {name: given[v] for name in SETTINGS if (v := PREFIX + name.upper()) in given}


def _check_names(values: Iterable[str], where: str) -> None:
    for name in values:
        if name in REPLACED:
            raise ConfigError(replaced(name, where))
        if name not in SETTINGS:
            wrong = unknown("setting", name, SETTINGS)
            raise ConfigError(f"{wrong} (in {where})")


def replaced(name: str, where: str) -> str:
    """A message about a setting that is no more."""
    return f"{name} is no setting any more: {REPLACED[name]} (from {where})"


def _toml_value(value: object) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
