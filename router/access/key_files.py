import logging
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from router.access.key_ring import Key, KeyRing, parse_keys, ring
from router.core.errors import ConfigError

log = logging.getLogger(__name__)

KEYS_VARIABLE = "EVENSTEP_API_KEYS"

_OF_OTHERS = stat.S_IRGRP | stat.S_IROTH


class KeySource:
    """The valid keys, as last read; in the environment's ``variable`` ``;`` also ends a line."""

    def __init__(self, file: str | None, variable: str | None = None) -> None:
        self._variable = variable
        self.ring = self.read(file)

    def read(self, file: str | None) -> KeyRing:
        """Read the keys, perhaps from another file; ``ring`` stays."""
        keys: list[Key] = []
        if file is not None:
            keys += parse_keys(_text(file), file)
        if self._variable is not None and (text := os.environ.get(self._variable)):
            keys += parse_keys(text.replace(";", "\n"), self._variable)
        return ring(keys, file or self._variable or "")

    def weight(self, name: str) -> float:
        """1 for a key that is gone."""
        key = self.ring.by_name.get(name)
        return 1.0 if key is None else key.weight


def key_source(file: str | None, variable: str | None = None) -> KeySource | None:
    """Keys of a file or a variable, if either is given."""
    given = file is not None or (variable is not None and os.environ.get(variable))
    return KeySource(file, variable) if given else None


def read_key(file: str) -> str:
    """The key of a file that holds nothing else; else ConfigError."""
    words = _text(file).split()
    if len(words) != 1 or not words[0].isascii() or not words[0].isprintable():
        raise ConfigError(f"{file} should hold one key in printable ASCII, and nothing else")
    return words[0]


def first_key(file: str) -> str:
    """The first key, alone or after its name; ConfigError without one."""
    for line in _text(file).splitlines():
        if (words := line.split()) and not words[0].startswith("#"):
            return words[min(1, len(words) - 1)]
    raise ConfigError(f"the key file {file} holds no key")


def warn_of_readers(files: Iterable[str]) -> None:
    """Log each secret file that other users can read."""
    for file in files:
        try:
            found = Path(file).stat()
        except OSError:
            continue  # the read fails elsewhere, with its own error
        mode = found.st_mode
        # A file of another user, as of a Kubernetes Secret, is meant to be read by its group.
        others = _OF_OTHERS if found.st_uid == os.geteuid() else stat.S_IROTH
        if stat.S_ISREG(mode) and mode & others:
            who = "everybody" if mode & stat.S_IROTH else "its group"
            log.warning("%s can be read by %s on this machine: chmod 600 it", file, who)


def _text(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the key file {file}: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"the key file {file} is not text") from None
