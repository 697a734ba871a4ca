from collections.abc import Iterable, MutableMapping
from typing import Any

from router.access.key_files import KeySource
from router.access.key_limits import KeyLimits
from router.access.key_ring import Key
from router.core.clock import Clock
from router.core.errors import UnknownKeyError

# Open as in vLLM: monitoring needs no key.
OPEN = frozenset({"/health", "/ready", "/version", "/metrics"})

# Headers that show a key. Anthropic's clients send the second one.
SHOWN_IN = (b"authorization", b"x-api-key")

Header = tuple[bytes, bytes]


class Door:
    """Admits requests within their key's limits; without ``keys`` all, and no key is passed on."""

    def __init__(self, keys: KeySource | None, limits: KeyLimits, clock: Clock) -> None:
        self._keys = keys
        self._limits = limits
        self._clock = clock

    def enter(self, scope: MutableMapping[str, Any]) -> Key | None:
        """Admit a request and remove its key from the headers.

        The scope gets the key's name (``tenant``), its ``targets``, and the headers as they were
        (``evenstep.shown``). The key is for ``leave``; None: the request is not counted.
        UnknownKeyError: the request has no valid key; KeyLimitError: it has reached a limit.
        """
        headers = scope["evenstep.shown"] = scope["headers"]
        scope["headers"] = [each for each in headers if each[0] not in SHOWN_IN]
        if self._keys is None or scope["path"] in OPEN:
            return None
        shown = shown_key(headers)
        key = None if shown is None else self._keys.ring.find(shown)
        if key is None:
            self._limits.unauthorized += 1
            wrong = "no API key is shown" if shown is None else "the API key is not known here"
            raise UnknownKeyError(f"{wrong}: send Authorization: Bearer KEY")
        scope["tenant"], scope["targets"] = key.name, key.targets
        if scope["method"] != "POST":
            return None
        self._limits.enter(key, self._clock())
        return key

    def leave(self, key: Key | None) -> None:
        if key is not None:
            self._limits.leave(key)


def shown_key(headers: Iterable[Header]) -> bytes | None:
    """The key in the headers; None if there is none, or more than one."""
    shown = [(name, value.strip()) for name, value in headers if name in SHOWN_IN]
    if len(shown) != 1:
        return None
    name, value = shown[0]
    if name == b"x-api-key":
        return value
    scheme, _, key = value.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else None
