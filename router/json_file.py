"""``--json FILE``, alike in every command: refused before the work, written after it."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from router.errors import InputError

STDOUT = "-"


def json_option(help_text: str) -> Any:
    """The option itself; a file that cannot be written is refused as the command line is read."""
    return typer.Option("--json", metavar="FILE", help=help_text, callback=writable)


def writable(file: str | None) -> str | None:
    """Look whether there can be such a file, without making or changing one.

    Raises:
        InputError: there cannot; says why.
    """
    if file is not None and file != STDOUT:
        try:
            fault = _fault(Path(file))
        except OSError as error:
            fault = error.strerror
        if fault is not None:
            raise InputError(f"--json: cannot write {file}: {fault}")
    return file


def write_json(report: Mapping[str, Any], file: str | None) -> None:
    """Write a report where the option says, if it was given.

    Raises:
        InputError: the file cannot be written after all.
    """
    if file is None:
        return
    text = json.dumps(report, indent=2, allow_nan=False) + "\n"
    if file == STDOUT:
        sys.stdout.write(text)
        return
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {file}: {error.strerror}") from error


def finite(value: float | None) -> float | None:
    """None for what is infinite, as JSON has no word for it, or not known."""
    return value if value is not None and math.isfinite(value) else None


def _fault(path: Path) -> str | None:
    if path.is_dir():
        return "it is a folder"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return "no permission"
    return None
