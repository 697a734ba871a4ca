"""A hook of mkdocs: kept figures say how old they are, under each table and as tooltips in text."""

from typing import Any

from docs.figure_blocks import filled
from docs.measured import measured_and_aged


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Hook that mkdocs calls for each page."""
    return filled(markdown, measured_and_aged, titles=True)
