"""The JSON of every dashboard, beside this file; ``docs.generate`` writes it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from dashboards.admission import ADMISSION
from dashboards.decisions import DECISIONS
from dashboards.energy import ENERGY
from dashboards.fleet import FLEET
from dashboards.grafana import render
from dashboards.panel import Board
from dashboards.worker import WORKERS

BOARDS: Sequence[Board] = (FLEET, WORKERS, ENERGY, ADMISSION, DECISIONS)
FOLDER = Path(__file__).resolve().parent


def stale() -> dict[Path, str]:
    """Out-of-date files with the text that their boards give."""
    return differing({FOLDER / f"{board.name}.json": render(board) for board in BOARDS})


def differing(texts: Mapping[Path, str]) -> dict[Path, str]:
    """The entries whose file is missing or has another text."""
    return {
        path: text
        for path, text in texts.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    }


def write(stale_files: Mapping[Path, str]) -> None:
    """Write these texts, and print the paths."""
    for path, text in stale_files.items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.name}")
