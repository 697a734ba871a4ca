"""List the kept figures whose deciding code has changed since; it fails for none of them.

python -m docs.stale_figures
"""

import json
from collections.abc import Iterator
from pathlib import Path

from loadgen.report.origin import KEY, ROOT, Document, code_hash

DATA = ROOT / "tests/data"
_MOST_PATHS = 4
_DEEPEST = 3


def kept_headers(folder: Path = DATA) -> Iterator[tuple[Path, dict[str, Document]]]:
    """Every kept file, by its path in the folder, with the headers of its parts by their names."""
    for file in sorted(folder.rglob("*.json")):
        document = json.loads(file.read_text(encoding="utf-8"))
        yield file.relative_to(folder), dict(origins(document))


def stale_figures(folder: Path = DATA) -> Iterator[str]:
    """One line for each file with stale parts, or without a header."""
    for name, headers in kept_headers(folder):
        since = {part: changed(header) for part, header in headers.items()}
        stale = [part for part, paths in since.items() if paths]
        if not headers:
            yield f"{name}: it does not say what decided it"
        elif stale:
            paths = list(dict.fromkeys(path for part in stale for path in since[part]))
            made = ", ".join(dict.fromkeys(_made(headers[part]) for part in stale))
            yield f"{name}{_parts(stale, len(headers))}: of {made}; changed since: {_first(paths)}"


def origins(document: object, name: str = "", depth: int = 0) -> Iterator[tuple[str, Document]]:
    """Headers in a document, with the names of their parts; the file's own has an empty name."""
    if not isinstance(document, dict) or depth > _DEEPEST:
        return
    if isinstance(header := document.get(KEY), dict):
        yield name, header
    for key, value in document.items():
        if key != KEY:
            yield from origins(value, f"{name}/{key}" if name else key, depth + 1)


def changed(header: Document) -> list[str]:
    """Files and folders that have changed since, or whose state then is unknown."""
    return [path for path, known in header["code"].items() if known != code_hash(path)]


def _parts(stale: list[str], parts: int) -> str:
    if len(stale) == parts:
        return ""
    return f" ({', '.join(stale) if len(stale) <= 3 else f'{len(stale)} of {parts} parts'})"


def _first(paths: list[str]) -> str:
    rest = len(paths) - _MOST_PATHS
    return ", ".join(paths[:_MOST_PATHS]) + (f" and {rest} more" if rest > 0 else "")


def _made(header: Document) -> str:
    return f"{header['commit'][:7]} on {header['date'][:10]}"


def main() -> None:
    """Print the lines."""
    for line in stale_figures():
        print(f"stale figures: {line}")


if __name__ == "__main__":
    main()
