"""TOML files, read alike wherever one is given."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from router.errors import ConfigError


def read_toml(path: Path) -> dict[str, Any]:
    """What the file says.

    Raises:
        ConfigError: it cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
