"""Who asks on the admin port: whose key, from where; a page of another origin changes nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection

from router.errors import EvenstepError

log = logging.getLogger(__name__)

_CHANGES_NOTHING = ("GET", "HEAD", "OPTIONS")


def is_foreign(client: HTTPConnection) -> bool:
    """Whether a browser says that a page of another origin is asking."""
    origin = client.headers.get("origin")
    return origin is not None and origin.partition("://")[2] != client.headers.get("host")


def is_foreign_change(client: HTTPConnection) -> bool:
    """Whether a page of another origin asks for more than to look."""
    return client.scope["method"] not in _CHANGES_NOTHING and is_foreign(client)


def own_pages_only(request: Request) -> None:
    """Of what a browser sends, let only that change something which a page of this port has sent.

    Raises:
        HTTPException: another page has.
    """
    if is_foreign_change(request):
        raise HTTPException(403, "a page of another origin may change nothing here")


@contextmanager
def audited(request: Request, what: str) -> Iterator[None]:
    """Log who has made a change, or who wanted it and why it was refused."""
    try:
        yield
    except (EvenstepError, HTTPException) as error:
        reason = error.detail if isinstance(error, HTTPException) else error
        log.info("admin (%s): %s: refused: %s", asked_by(request), what, reason)
        raise
    log.info("admin (%s): %s", asked_by(request), what)


def asked_by(request: Request) -> str:
    """Who asks, for the log: the name of the key if there are keys, and the address."""
    address = request.client.host if request.client else "nobody"
    operator: str | None = request.scope.get("operator")
    return address if operator is None else f"{operator}, {address}"
