"""Write the generated pages beside this file, the figures in all pages, and the dashboards.

python -m docs.generate            # write changed files
python -m docs.generate --check    # write nothing; exit 1 if a file is out of date; list figures
                                   # that code has decided which has changed since
"""

import sys
from pathlib import Path

from dashboards import generate as dashboards
from docs import stale_figures
from docs.commands_page import commands_text
from docs.figure_blocks import filled_pages
from docs.metrics_page import metrics_text
from docs.settings_page import settings_text

FOLDER = Path(__file__).resolve().parent
COMMAND = "python -m docs.generate"
_PAGES = {
    "settings.md": settings_text,
    "commands.md": commands_text,
    "metrics.md": metrics_text,
}


def stale() -> dict[Path, str]:
    """Out-of-date generated files with their new text."""
    pages = {FOLDER / name: text() for name, text in _PAGES.items()} | filled_pages()
    return dashboards.differing(pages) | dashboards.stale()


def main() -> None:
    """Generate or check all files."""
    changed = stale()
    if "--check" in sys.argv[1:]:
        stale_figures.main()
        names = ", ".join(path.name for path in changed)
        sys.exit(f"not up to date: {names}; run {COMMAND}" if names else 0)
    dashboards.write(changed)


if __name__ == "__main__":
    main()
