"""Origin of figures in a JSON file: code, commit, date, command, machine, its load, and versions.

The header is the value of ``origin``, in the file or in each of its parts that is measured alone.
It names the other files that the same run wrote in the JSON's folder, with their SHA-256.
Figures are stale once the code that decides them has changed (``docs.stale_figures``).
"""

import ast
import hashlib
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

KEY = "origin"
UNKNOWN = "unknown"
# Folder of the packages: the clone, or where they are installed.
ROOT = Path(__file__).resolve().parents[2]
# What a request passes through, and what stands in for vLLM.
SERVING = ("router/core", "router/dispatch", "router/engines", "router/http", "router/proxy")
EMULATION = (
    *("loadgen/emulator", "loadgen/engine", "loadgen/model"),
    *("engine_patches/admission", "engine_patches/stream"),
    "engine_patches/plugin/compat_admission.py",
)
_PACKAGES = ("evenstep", "numpy", "numba")
_PROSE = (".md", ".pyc")
# Names the command line that this process is part of.
COMMAND_VARIABLE = "FIGURES_COMMAND"
# About those of the process: the scripts that measure import this module first.
_BEGUN_S, _LOAD = time.monotonic(), os.getloadavg()

Document = dict[str, Any]
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Engines(StrEnum):
    """What stood for the engines."""

    EMULATED = "emulated"
    SIMULATED = "simulated"
    REAL = "real"
    UNKNOWN = UNKNOWN


def origin(
    engines: Engines,
    code: Sequence[str],
    physics: Mapping[str, object] | None = None,
    **versions: str,
) -> Document:
    """Header of figures that are made now, by this process.

    ``code``: files and folders that decide the figures, below ``ROOT``. ``physics``: features that
    modelled engines had; None: real ones, or none at all. ``versions``: of further programs.
    """
    return {
        "engines": engines.value,
        "physics": None if physics is None else dict(physics),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command(),
        "machine": machine(),
        **so_far(),
        "versions": {**installed_versions(), **versions},
        "code": {path: code_hash(path) for path in code},
    }


def with_files(header: Document, *files: Path) -> Document:
    """The header with the names and hashes of further files that the run wrote beside the JSON."""
    hashes = {file.name: sha256(file) for file in files}
    return header | {"files": hashes} if hashes else header


def sha256(file: Path) -> str:
    """Hash of a file's bytes."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def commit() -> str:
    """Commit of this clone; ``UNKNOWN`` where the packages are installed without one."""
    top, name = git("rev-parse", "--show-toplevel"), git("rev-parse", "HEAD")
    if not name or Path(top) != ROOT:
        return UNKNOWN
    code = git("status", "--porcelain", "-uno", "--", ".", ":!tests/data", ":!*.md")
    return f"{name} with changes" if code else name


def command() -> str:
    """Command line of this process, or the one it is part of; no paths of this machine alone."""
    if (whole := os.environ.get(COMMAND_VARIABLE)) is not None:
        return whole
    words = sys.orig_argv
    if words[1:] and Path(words[1]).name == "evenstep":
        return shlex.join(["evenstep", *map(_portable, words[2:])])
    return shlex.join(["python", *map(_portable, words[1:])])


def so_far() -> Document:
    """The machine's load averages as this process began and now, and the time between."""
    load = {"start": _LOAD, "end": os.getloadavg()}
    rounded = {when: [round(one, 2) for one in each] for when, each in load.items()}
    return {"load": rounded, "seconds": round(time.monotonic() - _BEGUN_S)}


def machine() -> dict[str, object]:
    """Processor and number of usable cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    model = (line.partition(": ")[2] for line in lines if line.startswith("model name"))
    return {"cpu": next(model, UNKNOWN), "cores": len(os.sched_getaffinity(0))}


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide figures, as far as they are installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def code_hash(path: str, root: Path | None = None) -> str | None:
    """Hash of a file or of a folder's files below ``ROOT``; None if there are none.

    Prose, layout, imports, file names and the order of definitions do not count: a moved or better
    documented function decides the same figures. Data files count byte for byte.
    """
    place = (root or ROOT) / path
    files = [place] if place.is_file() else sorted(place.rglob("*"))
    parts: list[str] = []
    for file in files:
        if file.suffix == ".py":
            parts += _definitions(file)
        elif file.is_file() and file.suffix not in _PROSE and file.parent.name != "__pycache__":
            parts.append(sha256(file))
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()[:16] if files else None


@cache
def _definitions(file: Path) -> list[str]:
    statements = bare_module(file).body
    return [shape(node) for node in statements if not isinstance(node, ast.Import | ast.ImportFrom)]


def bare_module(file: Path) -> ast.Module:
    """Syntax tree of a source file without docstrings."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, _Documented) and ast.get_docstring(node, clean=False) is not None:
            node.body[0] = ast.Pass()
    return tree


def shape(value: object) -> str:
    """Text of a syntax tree that is the same on every version of Python."""
    if isinstance(value, ast.AST):
        fields = [
            f"{name}={shape(each)}"
            for name, each in ast.iter_fields(value)
            if each is not None and each != []
        ]
        return f"{type(value).__name__}({', '.join(fields)})"
    return f"[{', '.join(map(shape, value))}]" if isinstance(value, list) else repr(value)


def _portable(word: str) -> str:
    path = Path(word)
    if not path.is_absolute():
        return word
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def git(*arguments: str) -> str:
    """Output of git in this clone; empty where git is missing or fails."""
    words = ["git", "-C", str(ROOT), *arguments]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
