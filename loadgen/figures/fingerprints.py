"""Fingerprints of finished runs, from all that they depend on: settings, lengths and code."""

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import router.core.policies
from loadgen.report.origin import bare_module, shape
from router.core.policies.policy_table import POLICIES

# Other policies use the rest of that package, too.
_PROGRAM = tuple(
    f"router.core.policies.bfio.{name}"
    for name in (
        *("policy", "compiled", "filling", "kernels", "local_search", "plan_kernel", "prompt_plan"),
        *("search", "solver"),
    )
)
_LOOKING = tuple(
    f"router.core.forecast.{name}" for name in ("end_signals", "forecast", "look_ahead")
)
# Prefill workers; their engines are the emulated ones.
_PREFILLING = (
    *(
        "loadgen.simulator.decode.prefill_results",
        "loadgen.simulator.decode.prefill_workers",
        "router.core.state.prefill_worker",
    ),
    *("loadgen.engine.", "engine_patches."),
)
_COMPUTE = ("router.", "loadgen.simulator.", "loadgen.model.power_model", *_PREFILLING)
_OTHER_SIMULATIONS = tuple(f"loadgen.simulator.{name}" for name in ("admission", "serving", "tune"))
# One engine and its admission.
_ADMITTING = (
    *(
        f"loadgen.simulator.admission.{name}"
        for name in ("admission_results", "admission_simulation", "predictions", "scenarios")
    ),
    *("loadgen.engine.", "engine_patches.admission", "router.core.kv_blocks"),
    *("router.core.step_time", "router.core.forecast.end_signals", "router.core.forecast.forecast"),
)
# Tracks live engines; the simulator has its own state.
_LIVE = (
    *("router.config", "router.core.wire"),
    *(
        f"router.core.state.{name}"
        for name in (
            *("cluster", "feed", "foreign_load", "group", "running_table", "step_watch"),
            *("rates", "worker", "worker_status"),
        )
    ),
)
# Chains of servers: placement and simulation.
_CHAINS = ("router.core.placement.", "loadgen.chains.")
_CHAINED = (*_CHAINS, "router.core.policies.", "router.core.types")
_POLICIES = "router.core.policies.policy_table"
# Only output, or no part of a simulation.
_ASIDE = (
    *("cli", "command", ".logs", ".table", "_table"),
    *(".instances", ".calibration", ".exact", ".exact_model", ".exact_response"),
)


@dataclass(frozen=True, slots=True)
class Code:
    """Modules that a simulation uses.

    Attributes:
        prefixes: prefixes of their names.
        unused: names, and prefixes of names, that are excluded again.
    """

    prefixes: tuple[str, ...]
    unused: tuple[str, ...] = ()


@cache
def decode_code(policy: str, *, prefill_workers: bool) -> Code:
    """Code of the decode simulator for a policy, with or without prefill workers."""
    unused = [*_LIVE, *_OTHER_SIMULATIONS, *_CHAINS]
    if policy != "bfio":
        unused += _PROGRAM
    if not POLICIES[policy].looks_ahead:
        unused += _LOOKING
    if not prefill_workers:
        unused += _PREFILLING
    return Code(_COMPUTE, tuple(unused))


ADMISSION_CODE = Code(_ADMITTING)
# The same for whole studies, as files and folders (``loadgen.report.origin``).
DECODE_FOLDERS = ("router/core", "loadgen/simulator/decode", "loadgen/model", "loadgen/traces")
HANDOFF_FOLDERS = (*DECODE_FOLDERS, "loadgen/engine")
ADMISSION_FOLDERS = (
    *("engine_patches/admission", "loadgen/simulator/admission", "loadgen/engine"),
    *("router/core/forecast", "router/core/kv_blocks.py", "router/core/step_time.py"),
)
SERVING_FOLDERS = ("router/core", "loadgen/simulator/serving", "loadgen/engine", "loadgen/traces")
CHAIN_FOLDERS = ("router/core/placement", "router/core/policies", "loadgen/chains")


@cache
def serving_code(policy: str) -> Code:
    """Code of whole engines under the live core, on a trace; a study has policies of its own."""
    used = (
        *("router.core.", "loadgen.simulator.serving.", "loadgen.engine.", "loadgen.traces."),
        "loadgen.figures.studies.serving_study",
    )
    unused = () if policy == "bfio" else _PROGRAM
    return Code(used, ("router.core.placement.", *unused))


def chain_code(*modules: str) -> Code:
    """Code of server chains, with further computing modules."""
    return Code((*_CHAINED, *modules), _PROGRAM)


def fingerprint(depends_on: Sequence[object], code: Code) -> str:
    """Fingerprint of one run."""
    text = json.dumps([*depends_on, _sum(code)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def modules_of(code: Code) -> dict[str, Path]:
    """Modules that a run goes through, among those that are imported, and their files."""
    return {
        name: path
        for name, path in sorted(_sources().items())
        if name.startswith(code.prefixes) and not name.startswith(code.unused)
    }


@cache
def _sum(code: Code) -> str:
    digest = hashlib.sha256()
    for name, path in modules_of(code).items():
        digest.update(f"{name}\n{shape(bare_module(path))}\n".encode())
    return digest.hexdigest()


def _sources() -> dict[str, Path]:
    """Modules and their files; policies are found without importing them."""
    folder = Path(next(iter(router.core.policies.__path__)))
    found = {
        ".".join(("router.core.policies", *path.relative_to(folder).with_suffix("").parts)): path
        for path in folder.rglob("*.py")
    }
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if path:
            found[name] = Path(path)
    return {
        name: path for name, path in found.items() if name == _POLICIES or not name.endswith(_ASIDE)
    }
