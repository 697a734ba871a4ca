"""The page of all settings of ``evenstep serve``, from their declarations."""

from collections.abc import Iterator
from enum import Enum
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from docs.markdown import code, default, number, plain, table
from router.config.serve_settings import GROUPS, title_of
from router.config.setting import IF_GIVEN, SettingGroup, marks_of, metavar_of, range_of, unit_of
from router.config.setting_sources import CONFIG_VARIABLE, PREFIX, flag_name

_HEAD = f"""# Settings

Every setting of `evenstep serve`. This page is generated from `router/config`: change a setting
there, then run `python -m docs.generate`.

The first source that gives a setting wins: its flag, its environment variable, the TOML file that
`--config` or `{CONFIG_VARIABLE}` names, its default. The file uses the setting's name. It may hold
workers as texts, `workers = ["http://127.0.0.1:8001,slots=64"]`, or as tables, `[[workers]]`. Where
a setting takes several values, its flag is repeated, and its variable separates them by spaces.
`evenstep serve --print-config` prints all settings as such a file.

The column *live* says whether a setting changes while the router runs. The router reads its
settings again at SIGHUP; most live ones change by `PATCH /settings` of the admin port too. *If
given* means that it changes so only if keys, or a certificate, were given at the start. All others
wait for the next start.

"""
_COLUMNS = ("setting, flag, variable", "default", "values", "live", "advanced", "what")


def settings_text() -> str:
    """The document."""
    return _HEAD + "\n".join(map(_section, GROUPS))


def _section(group: type[SettingGroup]) -> str:
    """The settings of one class."""
    title, sentence = title_of(group)
    path = f"{group.__module__.replace('.', '/')}.py"
    rows = ([*_row(name, field)] for name, field in group.model_fields.items())
    head = f"## {title}\n\n{plain(sentence)} Declared in [{path}](../{path}).\n\n"
    return f"{head}{table(_COLUMNS, rows)}"


def _row(name: str, field: FieldInfo) -> Iterator[str]:
    marks = marks_of(field)
    yield "<br>".join(map(code, (name, flag_name(name), PREFIX + name.upper())))
    yield "unset" if field.default in (None, ()) else default(field.default)
    yield f"{_values(name, field)} {unit_of(name)}".rstrip()
    yield marks["live"] if marks["live"] == IF_GIVEN else "yes" if marks["live"] else "no"
    yield "yes" if marks["advanced"] else ""
    yield plain(field.description or "")


def _values(name: str, field: FieldInfo) -> str:
    """Allowed values: choices, a range, or else the flag's placeholder."""
    if limits := range_of(field):
        return " to ".join(map(number, limits))
    if choices := _choices(field.annotation):
        return ", ".join(map(code, choices))
    return code(metavar_of(name, field))


def _choices(annotation: Any) -> list[str]:
    for kind in get_args(annotation) or (annotation,):
        if kind is bool:
            return ["true", "false"]
        if isinstance(kind, type) and issubclass(kind, Enum):
            return [each.value for each in kind]
    if get_origin(annotation) is Literal:
        return [each for each in get_args(annotation) if each is not NoneType]
    return []
