"""The page of all commands, from their table and functions."""

import inspect
from collections.abc import Callable, Iterator
from enum import Enum
from types import NoneType
from typing import Any, get_args

import typer
from typer.main import get_command
from typer.models import OptionInfo

from docs.markdown import code, default, number, plain, table
from router.cli import COMMANDS, PANELS, function_of
from router.config.serve_settings import ServeSettings
from router.config.setting_sources import flag_name

_HEAD = """# Commands

Every command of `evenstep`. This page is generated from `router/cli.py` and the commands' own
functions: change them there, then run `python -m docs.generate`. `evenstep COMMAND --help` says the
same.

"""
_WORDS = {int: "N", float: "X", str: "TEXT"}


def commands_text() -> str:
    """The document."""
    return _HEAD + "\n".join([*map(_overview, PANELS), *map(_section, COMMANDS)])


def _overview(panel: str) -> str:
    rows = (
        (f"[`{name}`](#evenstep-{name.replace(' ', '-')})", plain(command.summary))
        for name, command in COMMANDS.items()
        if name.partition(" ")[0] in PANELS[panel]
    )
    return f"**{panel}**\n\n{table(('command', 'what'), rows)}"


def _section(name: str) -> str:
    command = COMMANDS[name]
    function = function_of(command.target)
    rows = list(_rows(function))
    options = f"{table(('option', 'default', 'what'), rows)}\n" if rows else ""
    return (
        f"## evenstep {name}\n\n{_description(function)}"
        f"```console\n$ {command.example}\n```\n\n{options}{_settings(function)}"
    ).rstrip() + "\n"


def _description(function: Callable[..., None]) -> str:
    """The docstring; paragraphs marked as not wrapped become code blocks."""
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    return "".join(map(_paragraph, paragraphs))


def _paragraph(text: str) -> str:
    if text.startswith("\b\n"):
        return f"```text\n{text.removeprefix(chr(8)).strip()}\n```\n\n"
    return f"{plain(text)}\n\n"


def _rows(function: Callable[..., None]) -> Iterator[tuple[str, str, str]]:
    app = typer.Typer(add_completion=False)
    app.command()(function)
    typed = inspect.signature(function, eval_str=True).parameters
    for parameter in get_command(app).params:
        hidden = getattr(parameter, "hidden", False)
        if parameter.name in typed and not (hidden or _is_setting(typed[parameter.name])):
            yield _row(parameter, typed[parameter.name])


def _row(parameter: Any, typed: inspect.Parameter) -> tuple[str, str, str]:
    """One option or argument: its form, its default, its help."""
    kind, info = get_args(typed.annotation)[:2]
    value = parameter.metavar or _value(kind)
    if not isinstance(info, OptionInfo):
        return code(value), _default(parameter, typed), plain(info.help or "")
    names = ", ".join(parameter.opts)
    if parameter.secondary_opts:
        names = " / ".join((names, *parameter.secondary_opts))
    shown = names if kind is bool else f"{names} {value}"
    return code(shown), _default(parameter, typed), plain(" ".join(_help(parameter, info)))


def _help(parameter: Any, info: OptionInfo) -> Iterator[str]:
    """The help, with limits, repetition and environment variable."""
    yield info.help or ""
    limits = [
        f"{word} {number(limit)}"
        for word, limit in (("at least", info.min), ("at most", info.max))
        if limit is not None
    ]
    if limits:
        yield f"[{', '.join(limits)}]"
    if parameter.multiple:
        yield "[may be repeated]"
    if parameter.envvar:
        yield f"[variable: {parameter.envvar}]"


def _default(parameter: Any, typed: inspect.Parameter) -> str:
    value = typed.default
    if parameter.required:
        return "required"
    return "" if value is None or value == "" or value is False else default(value)


def _value(kind: Any) -> str:
    """Placeholder of a value without one of its own: its choices, else its type."""
    plain_kinds = [each for each in get_args(kind) if each is not NoneType] or [kind]
    first = plain_kinds[0]
    if isinstance(first, type) and issubclass(first, Enum):
        return "|".join(each.value for each in first)
    return _WORDS.get(first, "TEXT")


def _settings(function: Callable[..., None]) -> str:
    """Settings that the command also takes as flags; their page has the details."""
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    names = [each.name for each in parameters if _is_setting(each)]
    if not names:
        return ""
    if len(names) == len(ServeSettings.model_fields):
        return "Each of the [settings](settings.md) is a flag too.\n"
    flags = ", ".join(code(flag_name(name)) for name in names)
    return f"Flags of [settings](settings.md): {flags}.\n"


def _is_setting(parameter: inspect.Parameter) -> bool:
    """Whether ``with_flags`` made it from a setting: its help begins with the setting's."""
    field = ServeSettings.model_fields.get(parameter.name)
    if field is None or field.description is None:
        return False
    info = get_args(parameter.annotation)[1]
    return isinstance(info, OptionInfo) and (info.help or "").startswith(field.description)
