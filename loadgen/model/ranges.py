"""Settings that are numbers, and their ranges."""

import math
from collections.abc import Mapping

from router.core.errors import ConfigError


def check_ranges(settings: object, ranges: Mapping[str, tuple[float, float]]) -> None:
    """Check fields by their names, which are those of the options; None is unset."""
    for name, (least, most) in ranges.items():
        value = getattr(settings, name)
        if value is not None and not least <= value <= most:
            raise ConfigError(
                f"--{name.replace('_', '-')} must be from {least:g} to {most:g}, got {value}"
            )


def number_in(text: str) -> float:
    """The number, or NaN, which is in no range, where the text is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan
