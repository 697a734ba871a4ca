"""The Python files of other versions of vLLM, for the plug-in's checks against them.

A wheel is downloaded whole (300 MB); only its Python files are kept (40 MB). Modules without
compiled parts can be imported in the CPU engine's environment. Standard library only.
"""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path

from deploy.engine.build import cache_folder, ensure, run, say

KEPT = (".py", ".json")


def sources(version: str, python: Path) -> Path:
    """Folder with the package ``vllm`` of a version, for ``PYTHONPATH``.

    ``python``: interpreter with pip; its platform selects the wheel.

    Raises:
        BuildError: the wheel cannot be downloaded.
    """

    def unpack(folder: Path) -> None:
        say(f"downloading vllm {version} for its Python files (300 MB)")
        with tempfile.TemporaryDirectory() as scratch:
            pip = [str(python), "-m", "pip", "download", "-qq", "--no-input", "--no-deps"]
            run([*pip, "--dest", scratch, f"vllm=={version}"], f"no wheel of vllm {version} found")
            (wheel,) = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as opened:
                names = [name for name in opened.namelist() if name.endswith(KEPT)]
                opened.extractall(folder, names)

    folder = cache_folder() / f"vllm-{version}-python"
    ensure(folder, unpack)
    return folder
