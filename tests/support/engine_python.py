"""Programs that the engine's own interpreter runs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.support.engine import ENVIRONMENT, Installation

ROOT = Path(__file__).resolve().parents[2]


def real_schedulers(engine: Installation, task: str, steps: int) -> dict[str, Any]:
    """Let ``tests.support.real_schedulers`` do a task; its JSON.

    Raises:
        RuntimeError: it failed; the message is what it wrote last.
    """
    module = "tests.support.real_schedulers"
    environment = {"PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [str(engine.python), "-m", module, str(engine.model), task, str(steps)],
        env={**os.environ, **ENVIRONMENT, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=550,
    )
    if done.returncode:
        raise RuntimeError(f"{module} {task} ended with {done.returncode}\n{done.stderr[-4000:]}")
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report
