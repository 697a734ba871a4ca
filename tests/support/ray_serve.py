"""Ray Serve in an environment of its own, beside the engine's.

python -m tests.support.ray_serve    # build it if it is not there; print its folder
"""

import contextlib
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deploy.engine.build import INSTALL, cache_folder, ensure, is_complete, run

ROOT = Path(__file__).resolve().parents[2]
# A process of Ray's may take a minute to start where others compute.
WAIT_S = 180.0


_ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "RAY_USAGE_STATS_ENABLED": "0",
    # Else a shell that forbids byte code makes every process compile all of Ray.
    "PYTHONDONTWRITEBYTECODE": "",
}


def folder() -> Path:
    """Where it is, or would be."""
    digest = hashlib.sha256("".join((sys.version, *_requirements())).encode()).hexdigest()
    return cache_folder() / f"ray-{digest[:12]}"


def _requirements() -> list[str]:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    return list(extras["ray"])


def make(where: Path) -> None:
    """Install the extra ``ray``, and nothing else."""
    run([sys.executable, "-m", "venv", str(where)], "python -m venv failed; is ensurepip there?")
    python = str(where / "bin" / "python")
    run([python, *INSTALL, *_requirements()], "Ray cannot be installed: see pip's message above")


class RayCallError(Exception):
    """A call through Ray failed."""

    def __init__(self, told: dict[str, Any]) -> None:
        super().__init__(f"{told['error']}: {told['text']}")
        self.kind: str = told["error"]
        self.status: int | None = told.get("status")
        self.retry_after_s: float | None = told.get("retry_after_s")


@dataclass(frozen=True, slots=True)
class Asked:
    """A call under way."""

    number: int
    future: Future[Any]

    def result(self) -> Any:
        """What it returned; RayCallError: it failed."""
        return self.future.result(WAIT_S)


class RayServe:
    """Ray Serve as a process that is asked through pipes."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log = process, log
        self._numbers = itertools.count()
        self._pending: dict[int, Future[Any]] = {}
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told = json.loads(line)
            future = self._pending.pop(told.pop("number"))
            if "error" in told:
                future.set_exception(RayCallError(told))
            else:
                future.set_result(told["result"])
        for future in self._pending.values():
            future.set_exception(RuntimeError(f"Ray has ended\n{self.log_tail()}"))

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])

    def _order(self, do: str, **order: Any) -> Asked:
        assert self._process.stdin is not None
        number = next(self._numbers)
        future = self._pending[number] = Future()
        self._process.stdin.write(json.dumps({"number": number, "do": do, **order}) + "\n")
        self._process.stdin.flush()
        return Asked(number, future)

    def deploy(
        self,
        app: str,
        engines: Sequence[Sequence[str]],
        most: int = 100,
        *,
        stats: bool = False,
        **router: Any,
    ) -> None:
        """A replica for each list of engines; ``router``: the request router's arguments."""
        order = {"app": app, "engines": engines, "router": router, "most": most, "stats": stats}
        self._order("deploy", **order).result()

    def ask(self, app: str, body: object, method: str = "remote") -> Asked:
        """Call a deployment; another ``method`` than the main one by its name."""
        return self._order("ask", app=app, body=body, method=method)

    def cancel(self, asked: Asked) -> None:
        """Cancel a call."""
        self._order("cancel", asked=asked.number).result()


@contextlib.contextmanager
def running_ray(log: Path) -> Iterator[RayServe]:
    """Run Ray until the block ends; without it the test is skipped, unless REQUIRE_RAY is set."""
    if not is_complete(folder()):
        reason = "no Ray here: run `make ray`"
        if os.environ.get("REQUIRE_RAY"):
            pytest.fail(reason)
        pytest.skip(reason)
    python = str(folder() / "bin" / "python")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [python, "-m", "tests.support.ray_driver"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            env={**os.environ, **_ENVIRONMENT},
            start_new_session=True,
        )
    try:
        yield RayServe(process, log)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(WAIT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


if __name__ == "__main__":
    ensure(folder(), make)
    print(folder())  # noqa: T201
