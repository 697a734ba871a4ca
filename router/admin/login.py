"""An admin port protected by keys: a header for programs, a login page for people.

A login sets a cookie that no script can read and no other site's page can send. It names the key
and the expiry. Its signature covers a secret of this process and the key itself, so it ends with
either.
"""

import hashlib
import hmac
import logging
import secrets
from http import HTTPStatus
from urllib.parse import parse_qs

from starlette.requests import HTTPConnection, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from router.access.door import shown_key
from router.access.key_files import KeySource
from router.access.key_ring import Key
from router.admin.admin_guard import guarded, is_foreign, is_foreign_change
from router.admin.status_page import WEB
from router.core.clock import Clock
from router.core.errors import UnknownKeyError
from router.proxy.answers import error_answer, send_answer

log = logging.getLogger(__name__)

SESSION_S = 12 * 3600
_COOKIE = "evenstep_session"
_FORM_BYTES = 4096
_WRONG = '<p role="alert">That key is not known here.</p>'


class Sessions:
    """Issues and verifies cookies."""

    def __init__(self, keys: KeySource, clock: Clock) -> None:
        self._keys = keys
        self._clock = clock
        self._secret = secrets.token_bytes(32)

    def begin(self, key: Key) -> str:
        until_s = str(int(self._clock() + SESSION_S))
        return f"{until_s}.{self._signature(until_s, key)}.{key.name}"

    def find(self, cookie: str) -> Key | None:
        """None if the cookie expired or is not genuine."""
        until_s, _, rest = cookie.partition(".")
        signature, _, name = rest.partition(".")
        key = self._keys.ring.by_name.get(name)
        if key is None or not hmac.compare_digest(
            self._signature(until_s, key).encode(), signature.encode("latin-1", "replace")
        ):
            return None
        return key if int(until_s) > self._clock() else None

    def _signature(self, until_s: str, key: Key) -> str:
        said = f"{until_s} {key.name} ".encode("latin-1", "replace") + key.digest
        return hmac.new(self._secret, said, hashlib.sha256).hexdigest()


class KeyedOnly:
    """ASGI middleware: requires a key, and forbids browsers foreign content.

    ``scope["operator"]`` gets the key's name. The login and the page's files under ``/web`` need no
    key; they are the same in every router.
    """

    def __init__(self, app: ASGIApp, keys: KeySource, clock: Clock) -> None:
        self._app = app
        self._keys = keys
        self._sessions = Sessions(keys, clock)
        self._form = (WEB / "login.html").read_text(encoding="utf-8")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send = guarded(send, forms="'self'")
        asked = scope["method"], scope["path"]
        if asked == ("POST", "/login"):
            await (await self._log_in(Request(scope, receive)))(scope, receive, send)
            return
        key = self._known(scope)
        if key is not None or scope["path"].startswith("/web/"):
            scope["operator"] = None if key is None else key.name
            await self._app(scope, receive, send)
        elif asked[1] == "/":
            await self._login_page()(scope, receive, send)
        else:
            shown = shown_key(scope["headers"])
            wrong = "wants a key" if shown is None else "does not know that key"
            error = UnknownKeyError(f"the admin port {wrong}: send Authorization: Bearer KEY")
            await send_answer(send, error_answer(error))

    def _known(self, scope: Scope) -> Key | None:
        """A cookie counts only without a sign of another origin."""
        shown = shown_key(scope["headers"])
        if shown is not None:
            return self._keys.ring.find(shown)
        client = HTTPConnection(scope)
        if is_foreign_change(client):
            return None
        return self._sessions.find(client.cookies.get(_COOKIE, ""))

    async def _log_in(self, request: Request) -> Response:
        form = await _read(request)
        key = None if form is None or is_foreign(request) else self._keys.ring.find(form)
        if key is None:
            return self._login_page(_WRONG)
        log.info("admin port: %s has logged in", key.name)
        answer = RedirectResponse("/", HTTPStatus.SEE_OTHER)
        answer.set_cookie(
            _COOKIE,
            self._sessions.begin(key),
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return answer

    def _login_page(self, said: str = "") -> Response:
        page = self._form.replace("<!-- said -->", said)
        return HTMLResponse(page, HTTPStatus.UNAUTHORIZED, {"cache-control": "no-store"})


async def _read(request: Request) -> bytes | None:
    """The key in a login form; None if there is none or the form is too long."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _FORM_BYTES:
            return None
    keys = parse_qs(body.decode("latin-1"), max_num_fields=8).get("key", ())
    return keys[0].strip().encode("utf-8", "replace") if len(keys) == 1 else None
