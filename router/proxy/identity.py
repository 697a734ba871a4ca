"""What a request is called: as its client calls it, else as the router does; every answer says it.

The router's own token is what state messages are matched by, since clients repeat and forge theirs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = b"x-request-id"

_IDENTITY = "evenstep.identity"
# None repeats in practice; asking the kernel for each would cost more than all else about it.
_tokens = Random()
_SANE = re.compile(rb"[A-Za-z0-9._~-]{1,128}")


@dataclass(frozen=True, slots=True)
class Identity:
    """Names of a request.

    Attributes:
        token: the router's, unique, of the form ``es-`` and 20 hexadecimal digits.
        client_id: the client's, empty if it gave none, or one that is not sane.
    """

    token: str
    client_id: str = ""

    @property
    def name(self) -> str:
        """As its client knows it."""
        return self.client_id or self.token

    @property
    def header(self) -> tuple[bytes, bytes]:
        """What its answer says."""
        return HEADER, self.name.encode()


def read_identity(headers: Iterable[tuple[bytes, bytes]]) -> Identity:
    """The names of a request with these headers; an id that is there twice is no id."""
    given = [value for name, value in headers if name == HEADER]
    sane = len(given) == 1 and _SANE.fullmatch(given[0]) is not None
    return Identity(f"es-{_tokens.getrandbits(80):020x}", given[0].decode() if sane else "")


def identify(scope: Scope) -> Identity:
    """Give a request its names."""
    identity: Identity = scope.setdefault(_IDENTITY, read_identity(scope["headers"]))
    return identity


def identity_of(scope: Scope) -> Identity:
    """The names of a request; new ones where nobody gave any, as on the admin port."""
    identity: Identity | None = scope.get(_IDENTITY)
    return identity or read_identity(scope["headers"])


class Identified:
    """An ASGI application around another one, in which every request has its names.

    Args:
        app: answers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; the head of its answer says how it is called."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        identity = identify(scope)

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], identity.header]}
            await send(message)

        await self._app(scope, receive, named)
