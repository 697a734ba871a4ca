"""Keys from files and from the environment, read again when they are told to be."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from router.access.keys import Key, KeyRing, parse_keys, ring
from router.errors import ConfigError

log = logging.getLogger(__name__)

KEYS_VARIABLE = "EVENSTEP_API_KEYS"

_OF_OTHERS = stat.S_IRGRP | stat.S_IROTH


class KeySource:
    """Keys that count.

    Args:
        file: with a key a line, see ``access.keys``; None: there is none.
        variable: an environment variable with the same, lines ended by ``;`` or as in a file.

    Attributes:
        ring: the keys, as they were when they were read last.

    Raises:
        ConfigError: they cannot be read.
    """

    def __init__(self, file: str | None, variable: str | None = None) -> None:
        self._variable = variable
        self.ring = self.read(file)

    def read(self, file: str | None) -> KeyRing:
        """The keys as they are now, perhaps in another file; those that count stay the same.

        Raises:
            ConfigError: they cannot be read.
        """
        keys: list[Key] = []
        if file is not None:
            keys += parse_keys(_text(file), file)
        if self._variable is not None and (text := os.environ.get(self._variable)):
            keys += parse_keys(text.replace(";", "\n"), self._variable)
        return ring(keys, file or self._variable or "")

    def weight(self, name: str) -> float:
        """Of a key's share; of one that is there no more, that of all."""
        key = self.ring.by_name.get(name)
        return 1.0 if key is None else key.weight


def keys_wanted(file: str | None) -> bool:
    """Whether clients are to show keys."""
    return file is not None or bool(os.environ.get(KEYS_VARIABLE))


def key_source(file: str | None) -> KeySource | None:
    """The keys of a file, None where there is none."""
    return None if file is None else KeySource(file)


def check_keys(file: str) -> str:
    """The file, if it has keys.

    Raises:
        ConfigError: it cannot be read, or has none.
    """
    KeySource(file)
    return file


def read_key(file: str) -> str:
    """The one key in a file that holds nothing else.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    words = _text(file).split()
    if len(words) != 1 or not words[0].isascii() or not words[0].isprintable():
        raise ConfigError(f"{file} should hold one key in printable ASCII, and nothing else")
    return words[0]


def first_key(file: str) -> str:
    """The first key of a file, alone or behind its name as servers read it, to be shown to them.

    Raises:
        ConfigError: it cannot be read, or holds no key.
    """
    for line in _text(file).splitlines():
        if (words := line.split()) and not words[0].startswith("#"):
            return words[min(1, len(words) - 1)]
    raise ConfigError(f"the key file {file} holds no key")


def warn_of_readers(files: Iterable[str]) -> None:
    """Warn of those of these secret files that others than their owner can read."""
    for file in files:
        try:
            mode = Path(file).stat().st_mode
        except OSError:
            continue  # reading it is an error elsewhere
        if stat.S_ISREG(mode) and mode & _OF_OTHERS:
            who = "everybody" if mode & stat.S_IROTH else "its group"
            log.warning("%s can be read by %s on this machine: chmod 600 it", file, who)


def _text(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the key file {file}: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"the key file {file} is not text") from None
