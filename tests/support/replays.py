"""``evenstep replay`` in a process of its own."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.server import starting


def replay_command(url: str, file: Path, *flags: str) -> list[str]:
    """Write the report to ``file``."""
    return [sys.executable, "-m", "router.cli", "replay", "--url", url, "--json", str(file), *flags]


def run_replay(url: str, file: Path, *flags: str, limit_s: float = 600) -> dict[str, Any]:
    """Replay; the report, which says as well which requests failed.

    Args:
        url: of a router or an engine.
        file: for the report; one of an earlier replay is deleted first.
        flags: further ones of ``evenstep replay``.
        limit_s: for all of it.

    Raises:
        RuntimeError: it has made no report; the message is what it wrote last.
        subprocess.TimeoutExpired: it took too long.
    """
    file.unlink(missing_ok=True)
    done = subprocess.run(
        replay_command(url, file, *flags),
        check=False,
        timeout=limit_s,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if not file.exists():
        last = done.stderr[-2000:]
        raise RuntimeError(f"evenstep replay ended with {done.returncode}, no report\n{last}")
    report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return report


@contextlib.contextmanager
def replaying(url: str, folder: Path, *flags: str) -> Iterator[None]:
    """Traffic until the block ends, or the trace does."""
    command = replay_command(url, folder / "replay.json", *flags)
    with starting(command, 0, folder / "replay.log"):
        yield
