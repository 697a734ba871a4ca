"""The code that decides figures, as files and folders, and fingerprints of finished runs."""

import hashlib
import json
from collections.abc import Sequence
from functools import cache

from loadgen.report.origin import code_hash

DECODE_FOLDERS = ("router/core", "loadgen/simulator/decode", "loadgen/model", "loadgen/traces")
HANDOFF_FOLDERS = (*DECODE_FOLDERS, "loadgen/engine")
ADMISSION_FOLDERS = (
    *("engine_patches/admission", "loadgen/simulator/admission", "loadgen/engine"),
    *("router/core/forecast", "router/core/kv_blocks.py", "router/core/step_time.py"),
)
SERVING_FOLDERS = ("router/core", "loadgen/simulator/serving", "loadgen/engine", "loadgen/traces")
CHAIN_FOLDERS = ("router/core/placement", "router/core/policies", "loadgen/chains")

_hash = cache(code_hash)


def file_of(module: str) -> str:
    """The file of a module, as folders are named here."""
    return f"{module.replace('.', '/')}.py"


def fingerprint(depends_on: Sequence[object], code: Sequence[str]) -> str:
    """Fingerprint of one run, from its settings and the code that decides it."""
    text = json.dumps([*depends_on, *map(_hash, code)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
