"""Names finished runs by all that they depend on: settings, lengths, and the code that computes."""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import router.policies
from router.policies import POLICIES

_PROGRAM = tuple(
    f"router.policies.{name}"
    for name in ("bfio", "compiled", "filling", "kernels", "local_search", "search", "solver")
)
_LOOKING = tuple(
    f"router.{name}" for name in ("forecast", "lookahead", "signals", "survival", "tuning")
)
# Prefill workers, whose engines are the emulated ones.
_PREFILLING = (
    *("loadgen.simulator.handoff", "loadgen.simulator.prefill", "router.prefill"),
    *("loadgen.emulator.", "engine_patches."),
)
_COMPUTE = ("router.", "loadgen.simulator.", "loadgen.step_model", *_PREFILLING)
# One engine and who enters it, beside the emulated engine.
_ADMISSION = tuple(
    f"loadgen.simulator.{name}" for name in ("admission", "predictions", "scenarios")
)
_ADMITTING = (
    *_ADMISSION,
    *(f"loadgen.emulator.{name}" for name in ("engine", "handoff", "queues", "schedule")),
    "engine_patches.admission",
    *(f"router.{name}" for name in ("forecast", "signals", "survival", "workload")),
)
# What follows live engines; the simulator has its own.
_LIVE = tuple(
    f"router.{name}"
    for name in (
        *("cluster", "config", "feed", "foreign", "running", "settings"),
        *("service_rate", "token_rate", "wire", "worker"),
    )
)
# Chains of servers: what places them, and what simulates them.
_CHAINS = ("router.placement.", "loadgen.chains.")
_CHAINED = (*_CHAINS, "router.policies.", "router.types")
# What only talks, or is not part of a simulation.
_ASIDE = (
    *("cli", "command", "table", ".tune"),
    *(".instances", ".calibration", ".exact", ".exact_model"),
)


@dataclass(frozen=True, slots=True)
class Code:
    """Modules that a simulation goes through.

    Attributes:
        prefixes: of their names.
        unused: names, and beginnings of names, of those that it passes by all the same.
    """

    prefixes: tuple[str, ...]
    unused: tuple[str, ...] = ()


@cache
def decode_code(policy: str, *, prefill_workers: bool) -> Code:
    """Of the simulator of decode workers, by their policy and whether there are prefill workers."""
    unused = [*_LIVE, *_ADMISSION, *_CHAINS]
    if policy != "bfio":
        unused += _PROGRAM
    if not POLICIES[policy].looks_ahead:
        unused += _LOOKING
    if not prefill_workers:
        unused += _PREFILLING
    return Code(_COMPUTE, tuple(unused))


ADMISSION_CODE = Code(_ADMITTING)


def chain_code(*modules: str) -> Code:
    """Of chains of servers, with the modules that compute beside it."""
    return Code((*_CHAINED, *modules), _PROGRAM)


def fingerprint(depends_on: Sequence[object], code: Code) -> str:
    """Of one run, by all that it follows from."""
    text = json.dumps([*depends_on, _sum(code)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@cache
def _sum(code: Code) -> str:
    digest = hashlib.sha256()
    for name, path in sorted(_sources().items()):
        if name.startswith(code.prefixes) and not name.startswith(code.unused):
            digest.update(f"{name}\n{_bare(path)}\n".encode())
    return digest.hexdigest()


def _sources() -> dict[str, Path]:
    """Modules and their files; a policy's are found though they are not imported yet."""
    folder = Path(next(iter(router.policies.__path__)))
    found = {f"router.policies.{path.stem}": path for path in folder.glob("*.py")}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if path and name != "router.policies":
            found[name] = Path(path)
    return {name: path for name, path in found.items() if not name.endswith(_ASIDE)}


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
