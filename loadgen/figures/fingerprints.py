"""Names finished runs by all that they depend on: settings, lengths, and the code that computes."""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import router.policies
from loadgen.figures.cases import Case, settings
from loadgen.simulator.config import DecodeConfig
from loadgen.simulator.lengths import TraceLengths
from router.policies import POLICIES

_PROGRAM = frozenset(
    f"router.policies.{name}"
    for name in ("bfio", "compiled", "filling", "kernels", "local_search", "search", "solver")
)
_LOOKING = frozenset(
    f"router.{name}" for name in ("forecast", "lookahead", "signals", "survival", "tuning")
)
# Prefill workers, whose engines are the emulated ones.
_PREFILLING = (
    *("loadgen.simulator.handoff", "loadgen.simulator.prefill", "router.prefill"),
    *("loadgen.emulator.", "engine_patches."),
)
_COMPUTE = ("router.", "loadgen.simulator.", "loadgen.step_model", *_PREFILLING)
# What follows live engines; the simulator has its own.
_LIVE = frozenset(
    f"router.{name}"
    for name in (
        *("barrier", "cluster", "config", "feed", "foreign", "overcommit", "running"),
        *("token_rate", "wire", "worker"),
    )
)
# What only talks, or is not part of a simulation.
_ASIDE = (
    ".cli",
    "command",
    ".table",
    ".tune",
    ".instances",
    ".calibration",
    ".exact",
    ".exact_model",
)


def fingerprint(case: Case, config: DecodeConfig) -> str:
    """Of one run."""
    parts = [
        settings(config),
        config.seed,
        case.before_refill or None,
        case.keep_records,
        _lengths_sum(config),
        _code_sum(config.policy, config.prefill is not None),
    ]
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _lengths_sum(config: DecodeConfig) -> str:
    lengths = config.lengths
    if not isinstance(lengths, TraceLengths):
        return lengths.name
    return hashlib.sha256(lengths.prompts.tobytes() + lengths.outputs.tobytes()).hexdigest()


@cache
def _code_sum(policy: str, prefill_workers: bool) -> str:
    """Of the modules that a policy's simulation runs through, with prefill workers or without."""
    unused = frozenset() if policy == "bfio" else _PROGRAM
    if not POLICIES[policy].looks_ahead:
        unused |= _LOOKING
    digest = hashlib.sha256()
    for name, path in sorted(_sources()):
        if name not in unused and (prefill_workers or not name.startswith(_PREFILLING)):
            digest.update(f"{name}\n{_bare(path)}\n".encode())
    return digest.hexdigest()


def _sources() -> Iterator[tuple[str, Path]]:
    """Modules and their files; a policy's are found though they are not imported yet."""
    folder = Path(next(iter(router.policies.__path__)))
    found = {f"router.policies.{path.stem}": path for path in folder.glob("*.py")}
    for name in list(sys.modules):
        path = getattr(sys.modules[name], "__file__", None)
        if path and name.startswith(_COMPUTE) and name != "router.policies":
            found[name] = Path(path)
    for name, path in found.items():
        if name not in _LIVE and not name.endswith(_ASIDE):
            yield name, path


@cache
def _bare(path: Path) -> str:
    """A source without comments, layout and docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and _is_docstring(body[0]):
            body[0] = ast.Pass()
    return ast.dump(tree)


def _is_docstring(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
