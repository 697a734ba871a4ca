"""Settings that are numbers, and their ranges."""

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
