"""ZMQ CURVE security: only routers with an allowed key can read a state stream."""

from collections.abc import Iterable
from pathlib import Path

import zmq
from zmq.auth import load_certificate
from zmq.auth.thread import ThreadAuthenticator

from engine_patches.plugin.settings import PlugInError

_DOMAIN = "evenstep"


class CurveGate:
    """Authenticates every peer of a context's sockets, in a thread of its own.

    The context is used for nothing else. PlugInError: the file has no key pair, as
    ``zmq.auth.create_certificates`` writes it.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        secret_key_file: str,
        allowed_keys: Iterable[str],
        setting: str = "evenstep.secret_key_file",
    ) -> None:
        self._public, self._secret = _key_pair(secret_key_file, setting)
        self._allowed = frozenset(key.encode("ascii") for key in allowed_keys)
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(_DOMAIN, self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a peer with this public key is permitted (called by pyzmq)."""
        return key in self._allowed

    def secure(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket a CURVE server, before it is bound."""
        socket.zap_domain = _DOMAIN.encode("ascii")
        # Without a running authenticator every peer is rejected.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.curve_server = True
        socket.curve_publickey = self._public
        socket.curve_secretkey = self._secret

    def close(self) -> None:
        """Reject every new peer from now on."""
        self._authenticator.stop()


def _key_pair(file: str, setting: str) -> tuple[bytes, bytes]:
    if not Path(file).is_file():
        raise PlugInError(f"{setting}: there is no file {file}")
    try:
        public, secret = load_certificate(file)
    except (OSError, ValueError) as error:
        raise PlugInError(f"{setting} {file}: {error}") from error
    if public is None or secret is None:
        raise PlugInError(f"{setting} {file} holds no secret key (a .key_secret file)")
    try:
        belong_together = zmq.curve_public(secret) == public
    except (zmq.ZMQError, ValueError):
        belong_together = False
    if not belong_together:
        raise PlugInError(
            f"{setting} {file} holds no CURVE key pair (two keys that belong "
            "together, each of 40 characters of ZMQ's alphabet, Z85); make one with: "
            "evenstep keygen FILE"
        )
    return public, secret
