"""What protects the admin port: host names, the origin of changes, and headers for browsers.

Without keys the port serves this machine only; ``login`` protects it with keys.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import Request
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.core.errors import EvenstepError, InvalidRequestError
from router.dispatch.membership import BusyError, UnknownWorkerError
from router.http.port import is_loopback
from router.http.refusal import error_body
from router.proxy.answers import Answer, send_answer

log = logging.getLogger(__name__)

# No foreign content is run or fetched, and no other page may frame this one.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action {forms}; frame-ancestors 'none'"
)
_GUARDS = {
    "cross-origin-resource-policy": "same-origin",
    # With no-referrer, browsers omit a form's origin even on the same origin.
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
}


class LocalOnly:
    """ASGI middleware: rejects foreign host names, and forbids browsers foreign content.

    A foreign page can point its own name at 127.0.0.1 (DNS rebinding); Host shows that name.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (host := _host(scope)) is None or not is_loopback(host):
            named = "no single host name" if host is None else f"the host name {host!r}"
            message = (
                f"{named} in the request: the admin port answers to localhost and 127.0.0.1 only"
            )
            json = (b"content-type", b"application/json")
            body = error_body(message, "PermissionDeniedError", 403)
            await send_answer(send, Answer(403, body, (json,)))
        else:
            await self._app(scope, receive, guarded(send))


def _host(scope: Scope) -> str | None:
    """The Host header without its port; None unless there is exactly one."""
    hosts = [value for name, value in scope["headers"] if name == b"host"]
    if len(hosts) != 1:
        return None
    host: str = hosts[0].decode("latin-1")
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]


def guarded(send: Send, forms: str = "'none'") -> Send:
    """Add security headers to answers; ``forms``: allowed targets of forms."""

    async def send_guarded(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers.update(_GUARDS)
            headers["content-security-policy"] = _POLICY.format(forms=forms)
            # Otherwise browsers keep the files of an earlier version.
            headers.setdefault("cache-control", "no-cache")
        await send(message)

    return send_guarded


def is_foreign(client: HTTPConnection) -> bool:
    """Whether a browser sends this for a page of another origin."""
    origin = client.headers.get("origin")
    return origin is not None and origin.partition("://")[2] != client.headers.get("host")


def is_foreign_change(client: HTTPConnection) -> bool:
    """Whether a page of another origin requests a change."""
    return client.scope["method"] not in ("GET", "HEAD", "OPTIONS") and is_foreign(client)


def own_pages_only(request: Request) -> None:
    """Reject changes by pages of another origin with an HTTPException."""
    if is_foreign_change(request):
        raise HTTPException(403, "a page of another origin may change nothing here")


@contextmanager
def audited(request: Request, what: str) -> Iterator[None]:
    """Log a change with its origin, or the reason for its rejection, which is the answer too."""
    try:
        yield
    except EvenstepError as error:
        log.info("admin (%s): %s: refused: %s", asked_by(request), what, error)
        if isinstance(error, UnknownWorkerError | BusyError):
            status = 404 if isinstance(error, UnknownWorkerError) else 409
            raise HTTPException(status, str(error)) from None
        raise InvalidRequestError(str(error)) from None
    log.info("admin (%s): %s", asked_by(request), what)


def asked_by(request: Request) -> str:
    """Return the client's address, and the name of its key if there are keys."""
    address = request.client.host if request.client else "nobody"
    operator: str | None = request.scope.get("operator")
    return address if operator is None else f"{operator}, {address}"
