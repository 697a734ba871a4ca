"""The door: who shows a key comes in, as far as the key's limits allow."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any, Protocol

from router.access.keys import Key, KeyRing
from router.clock import Clock
from router.errors import UnknownKeyError

# As in vLLM, whoever watches over the router needs no key.
OPEN = frozenset({"/health", "/version", "/metrics"})

SHOWN = "evenstep.shown"

# Anthropic's clients show it in the second one.
_SHOWN_IN = (b"authorization", b"x-api-key")

Header = tuple[bytes, bytes]


class Keys(Protocol):
    """The keys that count now."""

    @property
    def ring(self) -> KeyRing:
        """All of them."""
        ...


class Limits(Protocol):
    """Counts the requests of keys; see ``KeyLimits``."""

    unauthorized: int

    def enter(self, key: Key, now_s: float) -> None:
        """See ``KeyLimits``."""
        ...

    def leave(self, key: Key) -> None:
        """See ``KeyLimits``."""
        ...


class Door:
    """Lets in who has a key, one request after another as far as its limits allow.

    Args:
        keys: those that count; None: all may ask, and what they show is not passed on.
        limits: counts the requests.
        clock: seconds, monotonic.
    """

    def __init__(self, keys: Keys | None, limits: Limits, clock: Clock) -> None:
        self._keys = keys
        self._limits = limits
        self._clock = clock

    def enter(self, scope: MutableMapping[str, Any]) -> Key | None:
        """A request wants to come in.

        The key goes no further: the scope is told the name that stands for it (``tenant``), and
        what was shown (``SHOWN``) for another process of this router, which asks for it as well.

        Args:
            scope: the request's, as in ASGI.

        Returns:
            The key by which it is counted until it is given to ``leave``; None: it is not.

        Raises:
            UnknownKeyError: it shows no key that counts.
            KeyLimitError: the key has reached a limit.
        """
        headers = scope["headers"]
        scope["headers"] = [each for each in headers if each[0] not in _SHOWN_IN]
        scope[SHOWN] = [each for each in headers if each[0] in _SHOWN_IN]
        if self._keys is None or scope["path"] in OPEN:
            return None
        key = self._known(headers, self._keys)
        scope["tenant"] = key.name
        if scope["method"] != "POST":
            return None
        self._limits.enter(key, self._clock())
        return key

    def leave(self, key: Key | None) -> None:
        """A request that came in has ended."""
        if key is not None:
            self._limits.leave(key)

    def _known(self, headers: Iterable[Header], keys: Keys) -> Key:
        shown = shown_key(headers)
        key = None if shown is None else keys.ring.find(shown)
        if key is None:
            self._limits.unauthorized += 1
            wrong = "no API key is shown" if shown is None else "the API key is not known here"
            raise UnknownKeyError(f"{wrong}: send Authorization: Bearer KEY")
        return key


def shown_key(headers: Iterable[Header]) -> bytes | None:
    """The key in a request's headers, None if there is none, or more than one."""
    shown = [(name, value.strip()) for name, value in headers if name in _SHOWN_IN]
    if len(shown) != 1:
        return None
    name, value = shown[0]
    if name == b"x-api-key":
        return value
    scheme, _, key = value.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else None
