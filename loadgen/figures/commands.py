"""Options of a command, as a dataclass, written as the command line that gives them again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from typing import Any


def differing(options: Any, *always: str) -> dict[str, object]:
    """Options that are not the defaults, as they are typed.

    Args:
        options: a dataclass whose fields all have defaults.
        always: fields that are shown all the same, first.
    """
    default = type(options)()
    rest = [each.name for each in fields(options) if each.name not in always]
    names = [*always, *(name for name in rest if getattr(options, name) != getattr(default, name))]
    return {name: _typed(getattr(options, name)) for name in names}


def _typed(value: object) -> object:
    return value.value if isinstance(value, Enum) else value


def typed(command: str, given: Mapping[str, object]) -> str:
    """A command with its options, each under the name of its field."""
    flags = [
        f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in given.items()
    ]
    return " ".join([command, *flags])
