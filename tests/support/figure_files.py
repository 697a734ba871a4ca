"""Files of figures that a bench has measured, each with its header."""

import json
from collections.abc import Mapping
from pathlib import Path

from loadgen.report.origin import KEY, Document, so_far, with_files


def write_figures(
    file: Path, figures: Mapping[str, object], header: Document, *beside: Path
) -> None:
    """Write this process's figures with their header; ``beside``: what else it wrote there."""
    header = with_files(header | so_far(), *beside)
    named = {key: value for key, value in figures.items() if key != KEY}
    text = json.dumps({KEY: header, **named}, indent=1, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")


def write_part(
    file: Path, name: str, part: Mapping[str, object], header: Document, *beside: Path
) -> None:
    """Replace one part of a file, with a header of its own; else as ``write_figures``."""
    kept: Document = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    header = with_files(header | so_far(), *beside)
    text = json.dumps(kept | {name: {KEY: header, **part}}, indent=1, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")
