import tomllib
from pathlib import Path
from typing import Any

from router.core.errors import ConfigError


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file; ConfigError: it cannot be read, or is not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
