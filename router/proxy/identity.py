"""A request's id: the client's if valid, else the router's; every answer carries it.

State messages are matched by the router's own token, because clients repeat and forge ids.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = b"x-request-id"

_IDENTITY = "evenstep.identity"
# Collisions do not occur in practice; the kernel's generator would cost more than the rest.
_tokens = Random()
_SANE = re.compile(rb"[A-Za-z0-9._~-]{1,128}")


@dataclass(frozen=True, slots=True)
class Identity:
    """Names of a request.

    Attributes:
        token: router's unique token, ``es-`` and 20 hexadecimal digits.
        client_id: client's id, empty if absent or malformed.
    """

    token: str
    client_id: str = ""

    @property
    def name(self) -> str:
        return self.client_id or self.token

    @property
    def header(self) -> tuple[bytes, bytes]:
        return HEADER, self.name.encode()


def read_identity(headers: Iterable[tuple[bytes, bytes]]) -> Identity:
    """Identity from a request's headers; a repeated id is ignored."""
    given = [value for name, value in headers if name == HEADER]
    sane = len(given) == 1 and _SANE.fullmatch(given[0]) is not None
    return Identity(f"es-{_tokens.getrandbits(80):020x}", given[0].decode() if sane else "")


def identify(scope: Scope) -> Identity:
    """The scope's identity, created if absent."""
    identity: Identity = scope.setdefault(_IDENTITY, read_identity(scope["headers"]))
    return identity


def identity_of(scope: Scope) -> Identity:
    """The scope's identity; a new one if absent, as on the admin port."""
    identity: Identity | None = scope.get(_IDENTITY)
    return identity or read_identity(scope["headers"])


class Identified:
    """ASGI middleware that gives every request an identity."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        identity = identify(scope)

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], identity.header]}
            await send(message)

        await self._app(scope, receive, named)
