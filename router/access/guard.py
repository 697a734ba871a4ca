"""Who may ask: a client shows a key, and is kept to its limits."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from router.access.files import KeySource
from router.access.keys import Key
from router.access.limits import KeyLimits
from router.decider import Clock
from router.errors import EvenstepError, UnknownKeyError
from router.proxy.answers import Header, error_answer, send_answer
from router.proxy.generation import dialect_of

# As in vLLM, whoever watches over the router needs no key.
OPEN = frozenset({"/health", "/version", "/metrics"})

# Anthropic's clients show it in the second one.
_SHOWN_IN = (b"authorization", b"x-api-key")


class KeyGuard:
    """Lets in who has a key, one request after another as far as its limits allow.

    The key goes no further: the scope is told the name that stands for it (``tenant``).

    Args:
        app: what is guarded.
        keys: those that count; None: all may ask, and what they show is not passed on.
        limits: counts the requests.
        clock: seconds, monotonic.
    """

    def __init__(
        self, app: ASGIApp, keys: KeySource | None, limits: KeyLimits, clock: Clock
    ) -> None:
        self._app = app
        self._keys = keys
        self._limits = limits
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = scope["headers"]
        scope["headers"] = [each for each in headers if each[0] not in _SHOWN_IN]
        if self._keys is None or scope["path"] in OPEN:
            await self._app(scope, receive, send)
            return
        counted = scope["method"] == "POST"
        try:
            key = self._known(headers, self._keys)
            scope["tenant"] = key.name
            if counted:
                self._limits.enter(key, self._clock())
        except EvenstepError as error:
            answer = dialect_of(scope["path"]).error(error_answer(error))
            await send_answer(send, answer)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            if counted:
                self._limits.leave(key)

    def _known(self, headers: Iterable[Header], keys: KeySource) -> Key:
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
