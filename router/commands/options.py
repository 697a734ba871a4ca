from typing import Any

import typer


def flag(
    help_text: str,
    metavar: str | None = None,
    least: float | None = None,
    name: str | None = None,
    most: float | None = None,
) -> Any:
    """An option: its help, the name of its value, its limits, and its name if not the field's."""
    return typer.Option(*filter(None, [name]), help=help_text, metavar=metavar, min=least, max=most)
