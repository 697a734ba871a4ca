"""The record of what an emulated fleet sent, read again."""

from pathlib import Path

import msgspec

from loadgen.emulator.sent import Sent


def read_sent(path: Path) -> list[Sent]:
    """Every line but one that is still being written."""
    lines = path.read_bytes().splitlines(keepends=True)
    return [msgspec.json.decode(line, type=Sent) for line in lines if line.endswith(b"\n")]
