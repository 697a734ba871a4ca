"""Files that users give, as TOML or JSON."""

import json
import tomllib
from pathlib import Path
from typing import Any

from router.core.errors import ConfigError, InputError


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file; ConfigError: it cannot be read, or is not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


def read_json(path: Path, named: str = "") -> Any:
    """Read a JSON file; InputError, which begins with ``named``: it cannot be, or is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{named}cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{named}{path} is not JSON: {error}") from None
