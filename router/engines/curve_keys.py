"""ZMQ CURVE for the router: its key pair, and each engine's public key.

Key files have the format of ``zmq.auth``, which the vLLM plug-in reads too.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.auth import load_certificate

from router.core.errors import ConfigError
from router.core.wire import is_curve_key

_FILE = '# evenstep: {kind}\nmetadata\ncurve\n    public-key = "{public}"\n'


@dataclass(frozen=True, slots=True)
class KeyPair:
    """The router's keys; engines authorize the public one."""

    public: bytes
    secret: bytes

    def secure(self, socket: zmq.Socket[bytes], server_key: str) -> None:
        socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret
        socket.curve_serverkey = server_key.encode("ascii")


def read_key_pair(file: str) -> KeyPair:
    """Raises ConfigError: it is unreadable or has no secret key."""
    if not Path(file).is_file():
        raise ConfigError(f"there is no key file {file!r}; make one with: evenstep keygen FILE")
    public, secret = _load(file)
    if secret is None:
        raise ConfigError(f"{file} holds no secret key; make one with: evenstep keygen FILE")
    return KeyPair(public, secret)


def read_public_key(key_or_file: str) -> str:
    """A public key, from its 40 characters or from a key file; ConfigError: it is neither."""
    if is_curve_key(key_or_file) and not Path(key_or_file).is_file():
        return key_or_file
    return _load(key_or_file)[0].decode("ascii")


def write_key_pair(file: Path) -> str:
    """Write a file that only its owner can read; the public key, or ConfigError."""
    public, secret = (key.decode("ascii") for key in zmq.curve_keypair())
    text = _FILE.format(kind="a secret key, never to be shared", public=public)
    try:
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
            opened.write(f'{text}    secret-key = "{secret}"\n')
    except FileExistsError:
        raise ConfigError(
            f"{file} exists; name another file, or remove it first; "
            f"evenstep keygen --public {file} prints the public key that is in it"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from None
    return public


def _load(file: str) -> tuple[bytes, bytes | None]:
    if not Path(file).is_file():
        raise ConfigError(f"{file!r} is neither a public CURVE key of 40 characters nor a file")
    try:
        text = Path(file).read_text(encoding="utf-8").strip()
        if is_curve_key(text):
            return text.encode("ascii"), None
        public, secret = load_certificate(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"key file {file}: {error}") from None
    for key in (public, secret):
        if key is not None and not is_curve_key(key.decode("latin-1")):
            raise ConfigError(f"key file {file}: a key has 40 characters of ZMQ's alphabet (Z85)")
    return public, secret
