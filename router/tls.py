"""The certificate that clients are shown, which can be exchanged while the router serves."""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Iterator
from pathlib import Path

from router.errors import ConfigError


def read(cert: str, key: str | None) -> tuple[bytes, bytes | None]:
    """What the files hold now: a certificate and its key that can be shown.

    Args:
        cert: PEM file with the certificate and those that lead up to a known one.
        key: PEM file with its key; None: it is in the same file.

    Raises:
        ConfigError: a file cannot be read, is no PEM, or the key is another certificate's.
    """
    try:
        pair = Path(cert).read_bytes(), None if key is None else Path(key).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from None
    if why := refusal(pair):
        given = f"--tls-cert {cert}" + ("" if key is None else f" with --tls-key {key}")
        raise ConfigError(f"cannot use {given}: {why}")
    return pair


def server_context(cert: bytes, key: bytes | None) -> ssl.SSLContext:
    """For TLS 1.2 and later, by the defaults of Python's ``ssl``.

    Raises:
        ConfigError: see ``load``.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    load(context, cert, key)
    return context


def load(context: ssl.SSLContext, cert: bytes, key: bytes | None) -> None:
    """Show another certificate from the next connection on.

    Raises:
        ConfigError: it cannot be shown; the one in use stays.
    """
    # A pair that does not match would take the one in use away: it is tried elsewhere first.
    if why := refusal((cert, key)):
        raise ConfigError(f"the certificate cannot be used: {why}")
    _load(context, cert, key)


def refusal(pair: tuple[bytes, bytes | None]) -> str:
    """Why a certificate and its key cannot be shown; empty: they can."""
    try:
        _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), *pair)
    except ssl.SSLError as error:
        return _why(error)
    except OSError as error:
        return str(error)
    return ""


def _load(context: ssl.SSLContext, cert: bytes, key: bytes | None) -> None:
    with _in_memory(cert) as cert_file, _in_memory(key) as key_file:
        context.load_cert_chain(cert_file or "", key_file, password=_no_password)


@contextlib.contextmanager
def _in_memory(pem: bytes | None) -> Iterator[str | None]:
    """A file, since ``ssl`` reads nothing else, that never lies on a disk."""
    if pem is None:
        yield None
        return
    with os.fdopen(os.memfd_create("pem"), "wb") as file:
        file.write(pem)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"


def _why(error: ssl.SSLError) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return "the key is not the certificate's"
    return "they should be PEM: the certificate, and its key without a password"


def _no_password() -> str:
    """Instead of asking for one on the terminal."""
    return ""
