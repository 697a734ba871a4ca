"""``--json FILE`` of every command: checked before the work, written after it."""

import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from router.core.errors import InputError

STDOUT = "-"


def json_option(help_text: str) -> Any:
    """The option; it rejects an unwritable file while the command line is parsed."""
    return typer.Option("--json", metavar="FILE", help=help_text, callback=writable)


def writable(file: str | None) -> str | None:
    """Check that a file can be written, without changing it; InputError says why it cannot."""
    if file is None or file == STDOUT:
        return file
    path, fault = Path(file), None
    try:
        if path.is_dir():
            fault = "it is a folder"
        elif not path.parent.is_dir():
            fault = f"there is no folder {path.parent}"
        elif not os.access(path if path.exists() else path.parent, os.W_OK):
            fault = "no permission"
    except OSError as error:
        fault = error.strerror
    if fault is not None:
        raise InputError(f"--json: cannot write {file}: {fault}")
    return file


def write_json(report: Mapping[str, Any], file: str | None) -> None:
    """Write a report to the option's file, if one was given; InputError: it cannot be written."""
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
    """None for infinite or unknown values, which JSON cannot express."""
    return value if value is not None and math.isfinite(value) else None
