"""API keys: file format, parsing and lookup.

One key a line: ``NAME KEY [weight=2] [concurrency=32] [rate=10/s] [ttft_ms=500] [tpot_ms=40]``.
Empty lines and lines that begin with ``#`` are ignored. Only a hash of each key is kept in memory.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from router.core.errors import ConfigError
from router.core.step_time import number_in
from router.core.targets import Targets

SHORTEST = 16

_TERMS = frozenset({"weight", "concurrency", "rate", "ttft_ms", "tpot_ms"})
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}")
_KEY = re.compile(rf"[!-~]{{{SHORTEST},1024}}")
_RATE = re.compile(r"(\d{1,9})/(s|min|h)")
_MILLISECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class Rate:
    """A number of requests per period; after an idle period all may come at once."""

    requests: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Key:
    """``concurrency``: requests at a time. It and ``rate`` are None if unlimited.

    ``targets``: of its requests whose headers name none.
    """

    name: str
    digest: bytes
    weight: float = 1.0
    concurrency: int | None = None
    rate: Rate | None = None
    targets: Targets | None = None


class KeyRing:
    """The valid keys, by name."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self.by_name: Mapping[str, Key] = {key.name: key for key in keys}

    def changes_since(self, before: KeyRing) -> str:
        now, old = self.by_name, before.by_name
        changes = {
            "added": now.keys() - old.keys(),
            "removed": old.keys() - now.keys(),
            "changed": {name for name in now.keys() & old.keys() if now[name] != old[name]},
        }
        return ", ".join(
            f"{change} {' '.join(sorted(names))}" for change, names in changes.items() if names
        )

    def find(self, shown: bytes) -> Key | None:
        """Every key is compared, each in constant time."""
        digest, found = digest_of(shown), None
        for key in self.by_name.values():
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found


def digest_of(key: bytes) -> bytes:
    """SHA-256 of a key."""
    return hashlib.sha256(key).digest()


def parse_keys(text: str, source: str) -> Iterator[Key]:
    """One key a line; a ConfigError names the source, and quotes no key."""
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if words and not words[0].startswith("#"):
            yield _parse(words, f"{source}, line {number}")


def ring(keys: Iterable[Key], source: str) -> KeyRing:
    """Collect keys; ConfigError: there is no key, or two share a name or a key."""
    names: dict[str, Key] = {}
    digests: dict[bytes, Key] = {}
    for key in keys:
        if names.setdefault(key.name, key) is not key:
            raise ConfigError(f"{source}: two keys are called {key.name!r}: give each its own name")
        if (other := digests.setdefault(key.digest, key)) is not key:
            raise ConfigError(f"{source}: {other.name!r} and {key.name!r} have one key")
    if not names:
        raise ConfigError(f"{source} holds no key: a line each, NAME KEY")
    return KeyRing(names.values())


def _parse(words: list[str], where: str) -> Key:
    if len(words) < 2:
        raise ConfigError(f"{where}: a key needs a name before it: NAME KEY")
    name, key, *terms = words
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: a name has letters, digits and . _ @ + - (64 at most)")
    if not _KEY.fullmatch(key):
        raise ConfigError(
            f"{where}: the key of {name!r} is not one of {SHORTEST} to 1024 printable ASCII "
            "characters; make one with: openssl rand -hex 24"
        )
    given: dict[str, str] = {}
    for term in terms:
        what, equals, value = term.partition("=")
        if not equals or what in given or what not in _TERMS:
            raise ConfigError(
                f"{where}: {name!r} may have weight=W, concurrency=N, rate=N/s (or /min, /h), "
                f"ttft_ms=N and tpot_ms=N, each once, not {term[:40]!r}"
            )
        given[what] = value
    return Key(
        name,
        digest_of(key.encode("ascii")),
        _weight(given.get("weight", "1"), where),
        _concurrency(given.get("concurrency"), where),
        _rate(given.get("rate"), where),
        _targets(given, where),
    )


def _weight(value: str, where: str) -> float:
    weight = number_in(value)
    if not 1e-3 <= weight <= 1e3:
        raise ConfigError(f"{where}: weight={value[:40]} is not a number from 0.001 to 1000")
    return weight


def _concurrency(value: str | None, where: str) -> int | None:
    if value is None:
        return None
    if not re.fullmatch(r"[1-9]\d{0,8}", value):
        raise ConfigError(f"{where}: concurrency={value[:40]} is not a whole number above 0")
    return int(value)


def _rate(value: str | None, where: str) -> Rate | None:
    if value is None:
        return None
    found = _RATE.fullmatch(value)
    if found is None or not int(found[1]):
        raise ConfigError(f"{where}: rate={value[:40]} is not a rate, as in 10/s, 600/min or 90/h")
    return Rate(int(found[1]), _SECONDS[found[2]])


def _targets(given: Mapping[str, str], where: str) -> Targets | None:
    seconds: list[float | None] = []
    for what in ("ttft_ms", "tpot_ms"):
        if (value := given.get(what)) is None:
            seconds.append(None)
        elif _MILLISECONDS.fullmatch(value) and float(value):
            seconds.append(float(value) / 1000)
        else:
            raise ConfigError(f"{where}: {what}={value[:40]} is not a number above 0, as in 500")
    return None if seconds == [None, None] else Targets(*seconds)
