"""The line under a table of kept figures: when and at which commit they were measured.

The pages in the repository have dates and commits, which no later commit makes untrue. Those of the
site get the age, too, as it is when the site is built.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import cache

from docs.kept_figures import Read
from docs.stale_figures import DATA, changed, origins
from loadgen.report.origin import UNKNOWN, Document, git

Line = Callable[[Sequence[Document]], str]


def headers_of(reads: Iterable[Read]) -> list[Document]:
    """Headers of what was read: of the parts that were asked for, or of whole files."""
    parts: dict[str, list[str]] = {}
    for name, part in reads:
        parts.setdefault(name, []).extend([] if part is None else [part])
    found: list[Document] = []
    for name, asked in parts.items():
        headers = _headers(name)
        chosen = [headers[part] for part in asked if part in headers]
        found += chosen or headers.values()
    return found


@cache
def _headers(name: str) -> dict[str, Document]:
    return dict(origins(json.loads((DATA / name).read_text(encoding="utf-8"))))


def measured(headers: Sequence[Document]) -> str:
    """The line of the repository's pages."""
    return f"*{_measured(headers)}.*"


def measured_and_aged(headers: Sequence[Document]) -> str:
    """The line of the site's pages."""
    oldest = min(headers, key=lambda header: str(header["date"]))
    days = (datetime.now(UTC) - datetime.fromisoformat(oldest["date"])).days
    commits = git("rev-list", "--count", f"{oldest['commit'].partition(' ')[0]}..HEAD")
    more = f" and {_count(int(commits), 'commit')}" if commits else ""
    since = " The code that decides them has changed since." if any(map(changed, headers)) else ""
    return f"*{_measured(headers)}, {_count(days, 'day')}{more} ago.{since}*"


def _measured(headers: Sequence[Document]) -> str:
    days: dict[str, list[str]] = {}
    for date, (name, changes) in sorted({(_date(each), commit_of(each)) for each in headers}):
        days.setdefault(date, []).append(f"`{name}` {changes}".rstrip())
    when = ", ".join(f"{day} at {_listed(commits)}" for day, commits in days.items())
    kinds = sorted({each["engines"] for each in headers} - {UNKNOWN})
    return f"Measured {when}" + (f", {_listed(kinds)} engines" if kinds else "")


def _date(header: Document) -> str:
    """A header that was added later has the date of the commit that kept the figures."""
    return ("on or before " if "note" in header else "") + str(header["date"])[:10]


def commit_of(header: Document) -> tuple[str, str]:
    """The commit's short name, and "with changes" if there were any."""
    name, _, changes = header["commit"].partition(" ")
    return name[:7], changes


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _listed(words: Sequence[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last
