"""The certificate that clients are shown, which can be exchanged while the router serves."""

from __future__ import annotations

import ssl
from pathlib import Path

from router.errors import ConfigError


def server_context(cert: str, key: str | None) -> ssl.SSLContext:
    """For TLS 1.2 and later, by the defaults of Python's ``ssl``.

    Args:
        cert: PEM file with the certificate and those that lead up to a known one.
        key: PEM file with its key; None: it is in the same file.

    Raises:
        ConfigError: a file cannot be read, is no PEM, or the key is another certificate's.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    load(context, cert, key)
    return context


def load(context: ssl.SSLContext, cert: str, key: str | None) -> None:
    """Show another certificate from the next connection on; see ``server_context``."""
    # A pair that does not match would take the one in use away: it is tried elsewhere first.
    check(cert, key)
    context.load_cert_chain(cert, key, password=_no_password)


def check(cert: str, key: str | None) -> None:
    """See that a certificate can be shown; see ``server_context``."""
    try:
        for path in filter(None, (cert, key)):
            Path(path).open("rb").close()
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from None
    try:
        elsewhere = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        elsewhere.load_cert_chain(cert, key, password=_no_password)
    except ssl.SSLError as error:
        given = f"--tls-cert {cert}" + ("" if key is None else f" with --tls-key {key}")
        raise ConfigError(f"cannot use {given}: {_why(error)}") from None


def _why(error: ssl.SSLError) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return "the key is not the certificate's"
    return "they should be PEM: the certificate, and its key without a password"


def _no_password() -> str:
    """Instead of asking for one on the terminal."""
    return ""
