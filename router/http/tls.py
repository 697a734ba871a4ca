import contextlib
import os
import ssl
from collections.abc import Iterator
from pathlib import Path

from router.core.errors import ConfigError


def read(cert: str, key: str | None) -> tuple[bytes, bytes | None]:
    """Read PEM files; without ``key``, ``cert`` holds both; ConfigError: they are unusable."""
    try:
        pair = Path(cert).read_bytes(), None if key is None else Path(key).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from None
    if why := refusal(pair):
        given = f"--tls-cert {cert}" + ("" if key is None else f" with --tls-key {key}")
        raise ConfigError(f"cannot use {given}: {why}")
    return pair


def server_context(cert: bytes, key: bytes | None) -> ssl.SSLContext:
    """TLS 1.2 and later, with the defaults of Python's ``ssl``; raises as ``load``."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    load(context, cert, key)
    return context


def load(context: ssl.SSLContext, cert: bytes, key: bytes | None) -> None:
    """Replace the certificate for new connections; ConfigError: it is unusable, nothing changes."""
    # A mismatched pair would remove the one in use, so try it elsewhere first.
    if why := refusal((cert, key)):
        raise ConfigError(f"the certificate cannot be used: {why}")
    _load(context, cert, key)


def peer_context(cert: bytes) -> ssl.SSLContext:
    """For asking servers that show this very certificate, whatever names are in it."""
    own = cert[cert.index(b"-----BEGIN CERT") :].partition(b"-----END CERTIFICATE-----")
    context = ssl.create_default_context(cadata=b"".join(own[:2]).decode())
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def refusal(pair: tuple[bytes, bytes | None]) -> str:
    """Why certificate and key are unusable; empty if they are fine."""
    try:
        _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), *pair)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            return "the key is not the certificate's"
        return "they should be PEM: the certificate, and its key without a password"
    except OSError as error:
        return str(error)
    return ""


def _load(context: ssl.SSLContext, cert: bytes, key: bytes | None) -> None:
    with _in_memory(cert) as cert_file, _in_memory(key) as key_file:
        # Else a password would be asked for on the terminal.
        context.load_cert_chain(cert_file or "", key_file, password=lambda: "")


@contextlib.contextmanager
def _in_memory(pem: bytes | None) -> Iterator[str | None]:
    """Path of a file that never touches a disk: ``ssl`` reads only files."""
    if pem is None:
        yield None
        return
    with os.fdopen(os.memfd_create("pem"), "wb") as file:
        file.write(pem)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"
