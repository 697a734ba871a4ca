"""Origin of a request on the admin port: its key and address; foreign pages change nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection

from router.core.errors import EvenstepError

log = logging.getLogger(__name__)

_CHANGES_NOTHING = ("GET", "HEAD", "OPTIONS")


def is_foreign(client: HTTPConnection) -> bool:
    """Whether the request comes from a page of another origin, as its browser reports."""
    origin = client.headers.get("origin")
    return origin is not None and origin.partition("://")[2] != client.headers.get("host")


def is_foreign_change(client: HTTPConnection) -> bool:
    """Whether a page of another origin requests a change."""
    return client.scope["method"] not in _CHANGES_NOTHING and is_foreign(client)


def own_pages_only(request: Request) -> None:
    """Reject changes by pages of another origin.

    Raises:
        HTTPException: the request comes from such a page.
    """
    if is_foreign_change(request):
        raise HTTPException(403, "a page of another origin may change nothing here")


@contextmanager
def audited(request: Request, what: str) -> Iterator[None]:
    """Log a change with its origin, or the reason for its rejection."""
    try:
        yield
    except (EvenstepError, HTTPException) as error:
        reason = error.detail if isinstance(error, HTTPException) else error
        log.info("admin (%s): %s: refused: %s", asked_by(request), what, reason)
        raise
    log.info("admin (%s): %s", asked_by(request), what)


def asked_by(request: Request) -> str:
    """Return the origin for the log: address, and name of the key if there are keys."""
    address = request.client.host if request.client else "nobody"
    operator: str | None = request.scope.get("operator")
    return address if operator is None else f"{operator}, {address}"
