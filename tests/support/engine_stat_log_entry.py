"""Makes vLLM find the tests' plug-ins as it finds installed ones."""

from __future__ import annotations

from pathlib import Path


def install(folder: Path) -> Path:
    """Have vLLM find ``engine_stat_log``.

    Returns:
        The folder to add to ``PYTHONPATH``, beside the repository's.
    """
    entry = "tests.support.engine_stat_log:StatLog"
    return install_plug_in(folder, "vllm.stat_logger_plugins", "stat_log", entry)


def install_plug_in(folder: Path, group: str, name: str, entry: str) -> Path:
    """Write the metadata of a distribution with one entry point.

    Returns:
        The folder to add to ``PYTHONPATH``, beside the repository's.
    """
    info = folder / "plugins" / f"{name}-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {entry}\n")
    return info.parent
