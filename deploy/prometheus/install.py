"""Unpack Debian's Prometheus beside the CPU engine, without installing it: no service, no root.

    python -m deploy.prometheus.install    # unpack it if it is not there; print its folder

A Prometheus on the PATH has priority. Works on Debian and its derivatives; elsewhere install
Prometheus 2.42 or newer with your system's packages.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from deploy.engine.build import BuildError, cache_folder, ensure, is_complete, say

# Without a network apt-get may try for very long.
_PATIENCE_S = 120.0

ADVICE = "install prometheus (Debian: apt-get install prometheus), or run make prometheus"


def folder() -> Path:
    """Folder of the unpacked package."""
    return cache_folder() / "prometheus"


def find(program: str) -> str | None:
    """Path of ``prometheus`` or ``promtool``: from the PATH, else the unpacked one."""
    own = folder() / "usr" / "bin" / program
    return shutil.which(program) or (str(own) if is_complete(folder()) else None)


def unpack(into: Path) -> None:
    """Download Debian's package and unpack it; BuildError without apt, or without the package."""
    into.mkdir(parents=True, exist_ok=True)
    download = ("apt-get", "-qq", "download", "prometheus")
    if not _succeeds(into, *download) and not (
        _succeeds(into, "apt-get", "-qq", "update") and _succeeds(into, *download)
    ):
        raise BuildError(
            "apt-get cannot download prometheus (message above); put prometheus and promtool on "
            "the PATH"
        )
    package = next(into.glob("prometheus_*.deb"))
    if not _succeeds(into, "dpkg-deb", "-x", package.name, "."):
        raise BuildError(f"{package.name} could not be unpacked; is the disk full?")
    package.unlink()


def _succeeds(cwd: Path, *command: str) -> bool:
    try:
        done = subprocess.run(command, cwd=cwd, stdout=sys.stderr, check=False, timeout=_PATIENCE_S)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def lay(*programs: str) -> str | None:
    """Path of the first program, unpacking all if one is missing; None, and prints why."""
    if None in map(find, programs):
        try:
            ensure(folder(), unpack)
        except (BuildError, OSError) as error:
            say(str(error))
    return None if None in map(find, programs) else find(programs[0])


def main() -> int:
    """Print the folder of ``prometheus`` and ``promtool``, unpacking them if necessary."""
    program = lay("prometheus", "promtool")
    if program is None:
        return 1
    print(Path(program).parent)
    return 0


if __name__ == "__main__":
    sys.exit(main())
