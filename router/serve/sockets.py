import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version

from router.config.live import Part
from router.config.serve_settings import ServeSettings
from router.core.errors import ConfigError
from router.http.listening import listen, url
from router.http.port import is_loopback, loopback
from router.http.tls import load
from router.systemd import given_sockets

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ports:
    """Bound sockets; ``inherited``: systemd keeps the listener open."""

    listener: socket.socket
    admin: socket.socket | None
    inherited: bool

    def announce(self, settings: ServeSettings, tls: ssl.SSLContext | None) -> None:
        log.info(
            "evenstep %s: %s, %s dispatch, %d workers, %s",
            version("evenstep"),
            settings.policy,
            settings.dispatch.value,
            len(settings.workers),
            url(self.listener, tls),
        )
        if self.admin is not None:
            log.info("status page: %s", url(self.admin, admin_tls(self.admin, tls)))


@contextlib.contextmanager
def opened(settings: ServeSettings) -> Iterator[Ports]:
    """Bind the ports for the block; ConfigError: one cannot be bound, or needs a key."""
    if settings.port and settings.admin_port == settings.port:
        raise ConfigError(f"--admin-port {settings.port} is --port as well; give another")
    with contextlib.ExitStack() as sockets:
        given = given_sockets(("http", "admin"))
        if "http" in given:
            listener = given["http"]
        else:
            listener = listen(settings.host, settings.port, "--port")
        sockets.enter_context(listener)
        admin = given.get("admin")
        if admin is None and settings.admin_port is not None:
            admin = listen(settings.admin_host, settings.admin_port, "--admin-port")
        if settings.grpc_port is not None:  # gRPC binds it later, and says less
            listen(settings.host, settings.grpc_port, "--grpc-port").close()
        if admin is not None:
            sockets.enter_context(admin)
            if settings.admin_key_file is None:
                loopback(admin.getsockname()[0])
        yield Ports(listener, admin, "http" in given)


def certificate(shown: ssl.SSLContext) -> Part:
    """The certificate for new clients, read again even if the file names are unchanged."""

    def check(settings: ServeSettings) -> None:
        if settings.certificate is None:
            raise ConfigError("tls_cert is gone: a port that speaks HTTPS does so until it ends")

    def take(settings: ServeSettings) -> None:
        if settings.certificate is not None:
            load(shown, *settings.certificate)

    return Part(take, check, frozenset({"tls_cert", "tls_key"}))


def admin_tls(admin: socket.socket, tls: ssl.SSLContext | None) -> ssl.SSLContext | None:
    """None on loopback, where it is not needed."""
    return None if is_loopback(admin.getsockname()[0]) else tls
