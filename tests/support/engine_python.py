"""Programs that the engine's own interpreter runs."""

import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.support.engine import ENVIRONMENT, Installation

ROOT = Path(__file__).resolve().parents[2]


def real_schedulers(
    engine: Installation, steps: Mapping[str, int], vllm: Path | None = None
) -> dict[str, Any]:
    """Let ``tests.support.real_schedulers`` do tasks, with this vLLM if one is given; their JSON.

    ``steps``: of each task.
    """
    tasks = [f"{task}={count}" for task, count in steps.items()]
    return _report(engine, "tests.support.real_schedulers", *tasks, paths=[vllm])


def real_engines(
    engine: Installation, task: str, steps: int, *paths: Path | None
) -> dict[str, Any]:
    """Let ``tests.support.real_engines`` do a task, with what else lies at ``paths``; its JSON."""
    return _report(engine, "tests.support.real_engines", task, str(steps), paths=paths)


def hidden_lengths(engine: Installation, steps: int, vllm: Path | None = None) -> dict[str, Any]:
    """Let ``tests.support.hidden_lengths`` check so many steps, with this vLLM if one is given."""
    return _report(engine, "tests.support.hidden_lengths", "check", str(steps), paths=[vllm])


def _report(
    engine: Installation, module: str, *arguments: str, paths: Iterable[Path | None]
) -> dict[str, Any]:
    """Run a module; the JSON of its last line.

    Raises:
        RuntimeError: it failed; the message is what it wrote last.
    """
    found = [str(path) for path in (*paths, ROOT) if path is not None]
    environment = {"PYTHONPATH": os.pathsep.join(found), "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [str(engine.python), "-m", module, str(engine.model), *arguments],
        env={**os.environ, **ENVIRONMENT, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=1100,
    )
    if done.returncode:
        raise RuntimeError(
            f"{module} {arguments} ended with {done.returncode}\n{done.stderr[-4000:]}"
        )
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report
