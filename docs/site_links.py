"""A hook of mkdocs: links that leave docs/, and folders in the navigation.

A page may link to any file of the repository, as ``../tests/data/x.png``. GitHub shows the file;
the site gets a copy. A folder becomes a list of its files. Links to missing files are warnings,
which end ``make docs``; mkdocs itself checks links between pages.
"""

import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Folder of the copies on the site.
COPIES = "repository"
# Browsers show these as they are; other files get ``.txt``, so that a browser shows them.
_SHOWN = {".gif", ".html", ".jpg", ".json", ".pdf", ".png", ".svg", ".txt", ".webp"}
_LINK = re.compile(r"""(\]\(<?|^\[[^\]]+\]:\s+|(?:src|href)=["'])([^\s)>"'#]+)""", re.MULTILINE)
# A block, or inline code, which may span lines.
_CODE = re.compile(r"(^ *```.*?^ *```$|`(?:[^`\n]|\n(?! *\n))+`)", re.MULTILINE | re.DOTALL)


def outside(page: str, link: str) -> str | None:
    """Path from the repository's root, if the link leaves docs/ but not the repository."""
    if re.match(r"[a-z][a-z+.-]*:|/", link):
        return None
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    return None if path.split("/")[0] in {"docs", ".."} else path


def copy_of(path: str) -> str:
    """The site's path for a file of the repository."""
    shown = Path(path).suffix.lower() in _SHOWN
    return f"{COPIES}/{path}" if shown else f"{COPIES}/{path}.txt"


def links(markdown: str) -> list[str]:
    """Links of the page without anchors; code has no links."""
    return [link[2] for link in _LINK.finditer(_CODE.sub("", markdown))]


def rewritten(markdown: str, page: str, take: Callable[[str], bool]) -> str:
    """The page with its links out of docs/ changed to the copies.

    Args:
        markdown: text of the page; code stays unchanged.
        page: path of the page in docs/.
        take: function that puts a file of the repository on the site; False: there is none.
    """

    def lead(link: re.Match[str]) -> str:
        path = outside(page, link[2])
        if path is None or not take(path):
            return link[0]
        return f"{link[1]}{posixpath.relpath(copy_of(path), posixpath.dirname(page) or '.')}"

    parts = _CODE.split(markdown)
    return "".join(
        part if number % 2 else _LINK.sub(lead, part) for number, part in enumerate(parts)
    )


def with_folders(nav: Any, docs: Path) -> Any:
    """The navigation with each folder, like ``results/``, replaced by its pages."""
    if isinstance(nav, str):
        pages = sorted(docs.glob(f"{nav}*.md")) if nav.endswith("/") else []
        return [page.relative_to(docs).as_posix() for page in pages] or nav
    if isinstance(nav, dict):
        return {title: with_folders(entry, docs) for title, entry in nav.items()}
    return [with_folders(entry, docs) for entry in nav]


def on_config(config: Any) -> None:
    """Hook that mkdocs calls once."""
    config.nav = with_folders(config.nav, Path(config.docs_dir))


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Hook that mkdocs calls for each page."""
    from mkdocs.plugins import get_plugin_logger
    from mkdocs.structure.files import File

    name = page.file.src_uri

    def take(path: str) -> bool:
        if not (ROOT / path).exists():
            get_plugin_logger("links").warning("%s links to %s, which does not exist", name, path)
            return False
        if files.get_file_from_path(copy_of(path)) is None:
            files.append(File.generated(config, copy_of(path), content=_content(ROOT / path)))
        return True

    return rewritten(markdown, name, take)


def _content(path: Path) -> bytes:
    if path.is_dir():
        return "\n".join(sorted(each.name for each in path.iterdir())).encode()
    return path.read_bytes()
