"""Pieces of Markdown that GitHub and mkdocs render alike."""

from collections.abc import Iterable, Sequence
from enum import Enum


def code(text: str) -> str:
    """The text as code; a pipe in backticks would end a table's cell."""
    return f"<code>{_entities(text)}</code>" if "|" in text else f"`{text}`"


def plain(text: str) -> str:
    """The text with all Markdown and HTML escaped."""
    return _entities(text).replace("*", "\\*")


def number(value: float) -> str:
    """A number without a zero fraction, with commas between thousands."""
    return f"{int(value):,}" if value == int(value) else f"{value:g}"


def default(value: object) -> str:
    """A default in readable form."""
    if isinstance(value, bool):
        return code(str(value).lower())
    if isinstance(value, float) and value.is_integer():
        return code(str(int(value)))
    return code(str(value.value if isinstance(value, Enum) else value))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, with a line break at its end."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _entities(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;")
