"""Files under tests/data of which nothing says where they are from, or which have changed since.

A JSON file has a header, or its parts have. Every other file is named with its SHA-256 by the
header of the run that wrote it, in a JSON file of its folder or above; ``files.json`` names what
no run of today's scripts writes.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from docs.stale_figures import DATA, kept_headers
from loadgen.report.origin import KEY, sha256

# Rendered from a JSON file beside it; tests/contract/test_docs_figures.py compares them.
RENDERED = frozenset({"figures/figures.md"})


def named_files(folder: Path = DATA) -> dict[str, str]:
    """Files that headers name, with their hashes, by path in the folder."""
    return {
        str(json_file.parent / name): kept
        for json_file, headers in kept_headers(folder)
        for header in headers.values()
        for name, kept in header.get("files", {}).items()
    }


def without_provenance(folder: Path = DATA) -> Iterator[str]:
    """One line for each file that no header accounts for as it is."""
    named = named_files(folder)
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(file.relative_to(folder))
        if file.suffix == ".json":
            yield from _unsaid(name, file)
        elif name in named and named[name] != sha256(file):
            yield f"{name}: its header knows other bytes"
        elif name not in named and name not in RENDERED:
            yield f"{name}: no header names it"
    for name in sorted(named):
        if not (folder / name).exists():
            yield f"{name}: a header names it, and it is gone"


def _unsaid(name: str, file: Path) -> Iterator[str]:
    """A JSON file's parts without a header; the file's own counts for all."""
    document = json.loads(file.read_text(encoding="utf-8"))
    parts = document.get("studies", document)
    if KEY in document:
        return
    if not parts:
        yield f"{name}: no header"
    for part, found in parts.items():
        if not (isinstance(found, dict) and KEY in found):
            yield f"{name}: {part} has no header"
