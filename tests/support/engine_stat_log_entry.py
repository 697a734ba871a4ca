"""Makes vLLM find ``engine_stat_log`` as it finds an installed plug-in."""

from __future__ import annotations

from pathlib import Path


def install(folder: Path) -> Path:
    """Write a distribution's metadata.

    Returns:
        The folder to add to ``PYTHONPATH``, beside the repository's.
    """
    info = folder / "plugins" / "stat_log-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stat-log\nVersion: 0\n")
    entry = "stat_log = tests.support.engine_stat_log:StatLog"
    (info / "entry_points.txt").write_text(f"[vllm.stat_logger_plugins]\n{entry}\n")
    return info.parent
