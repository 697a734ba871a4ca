"""Commands whose options are the fields of a dataclass with typer's annotations."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

Command = Callable[..., None]
Options = TypeVar("Options")


def command_of(options: type[Options]) -> Callable[[Callable[[Options], None]], Command]:
    """Make a function of options a command; typer reads the options from the fields."""

    def made(function: Callable[[Options], None]) -> Command:
        @wraps(function)
        def command(**given: Any) -> None:
            function(options(**given))

        command.__signature__ = inspect.signature(  # type: ignore[attr-defined]
            options, eval_str=True
        )
        return command

    return made
