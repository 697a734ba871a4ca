"""A hook of mkdocs: under each table of kept figures stands how old they are."""

from typing import Any

from docs.figure_blocks import filled
from docs.measured import measured_and_aged


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Hook that mkdocs calls for each page."""
    return filled(markdown, measured_and_aged)
