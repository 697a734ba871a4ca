"""The Python files of other versions of vLLM, for the plug-in's checks against them.

A wheel is downloaded whole (300 MB); only its Python files are kept (40 MB). Modules without
compiled parts can be imported in the CPU engine's environment. Standard library only.
"""

from pathlib import Path

from deploy.engine.build import cache_folder, downloaded, ensure, say

KEPT = (".py", ".json")


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
