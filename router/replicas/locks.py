"""The replicas' lock by its name on the command line."""

import re
from pathlib import Path

from router.core.errors import ConfigError
from router.kubernetes import Kubernetes
from router.replicas.file_lock import FileLock
from router.replicas.leading import Lock
from router.replicas.lease import LeaseLock

_FILE_LEASE_S, _LEASE_S = 10, 5


def lock_of(text: str, lease_s: int | None = None, api: str | None = None) -> Lock:
    """``file:PATH`` or ``lease:NAMESPACE/NAME``; without a ``lease_s`` its own.

    Raises:
        ConfigError: it is no such text, or there is no Kubernetes.
    """
    kind, _, rest = text.partition(":")
    if kind == "file" and rest:
        path = Path(rest)
        if not path.parent.is_dir() or path.is_dir():
            why = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
            raise ConfigError(f"replica_lock file:{path}: {why}; it should be a file of its own")
        return FileLock(path, lease_s or _FILE_LEASE_S)
    if kind == "lease" and re.fullmatch(r"[\w.-]+/[\w.-]+", rest):
        namespace, _, name = rest.partition("/")
        return LeaseLock(Kubernetes(api), namespace, name, lease_s or _LEASE_S)
    raise ConfigError(f"replica_lock {text!r} should be file:PATH or lease:NAMESPACE/NAME")
