"""The replicas' lock by its name on the command line."""

from pathlib import Path

from router.core.errors import ConfigError
from router.replicas.file_lock import FileLock
from router.replicas.leading import Lock


def lock_of(text: str, lease_s: int | None = None) -> Lock:
    """``file:PATH``; without a lease its own; ConfigError: it is no such text."""
    kind, _, rest = text.partition(":")
    if kind == "file" and rest:
        return FileLock(Path(rest), lease_s or 10)
    raise ConfigError(f"replica_lock {text!r} should be file:PATH")
