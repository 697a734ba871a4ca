"""Options of a command, as a dataclass, and the command line that sets them."""

import shlex
from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from typing import Any


def differing(options: Any, *always: str) -> dict[str, object]:
    """Options that are not the defaults, by their names on the command line.

    Args:
        options: dataclass whose fields all have defaults.
        always: fields that are always included, first.
    """
    default = type(options)()
    rest = [each.name for each in fields(options) if each.name not in always]
    names = [*always, *(name for name in rest if getattr(options, name) != getattr(default, name))]
    values = {name: getattr(options, name) for name in names}
    return {
        name: value.value if isinstance(value, Enum) else value for name, value in values.items()
    }


def typed(command: str, given: Mapping[str, object]) -> str:
    """A command with its options, each named as its field."""
    flags = [
        f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in given.items()
    ]
    return " ".join([command, *flags])
