"""Who may ask on an admin port without keys: only this machine, under its own names.

And what every answer of the port tells browsers; ``login`` has the port with keys.
"""

from __future__ import annotations

from ipaddress import ip_address

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.errors import ConfigError
from router.proxy.answers import Answer, send_answer
from router.proxy.events import error_body

# Nothing from elsewhere runs or is fetched, nor may another page frame this one.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action {forms}; frame-ancestors 'none'"
)
_GUARDS = {
    "cross-origin-resource-policy": "same-origin",
    # With no-referrer, browsers would not tell a form's origin even here.
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
}


def is_loopback(host: str) -> bool:
    """Whether a name or an address, without a port, can only mean this machine."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def loopback(host: str) -> str:
    """The address, if only this machine reaches it.

    Raises:
        ConfigError: others would, too.
    """
    if not is_loopback(host):
        raise ConfigError(
            f"admin_host {host} can be reached from other machines, and no keys guard the admin "
            "port: give --admin-key-file, or 127.0.0.1, ::1 or localhost; from elsewhere, forward "
            "a port to it: ssh -L PORT:127.0.0.1:PORT"
        )
    return host


class LocalOnly:
    """Turns away requests for another host name, and tells browsers to load nothing foreign.

    A page of another site can make its own name mean 127.0.0.1 (DNS rebinding) and would then be
    allowed to read the answers; but its name stands in the request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif (host := _host(scope)) is None or not is_loopback(host):
            await send_answer(send, _refusal(host))
        else:
            await self._app(scope, receive, guarded(send))


def _host(scope: Scope) -> str | None:
    """Of the Host header, without its port; None if there is not exactly one."""
    hosts = [value for name, value in scope["headers"] if name == b"host"]
    if len(hosts) != 1:
        return None
    host: str = hosts[0].decode("latin-1")
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]


def _refusal(host: str | None) -> Answer:
    named = "no single host name" if host is None else f"the host name {host!r}"
    message = f"{named} in the request: the admin port answers to localhost and 127.0.0.1 only"
    json = (b"content-type", b"application/json")
    return Answer(403, error_body(message, "PermissionDeniedError", 403), (json,))


def guarded(send: Send, forms: str = "'none'") -> Send:
    """Sends answers from which browsers load nothing foreign; ``forms`` may be sent there only."""

    async def send_guarded(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers.update(_GUARDS)
            headers["content-security-policy"] = _POLICY.format(forms=forms)
            # Else browsers go on with the files of a version before.
            headers.setdefault("cache-control", "no-cache")
        await send(message)

    return send_guarded
