from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import ip_address

from router.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of one port, as ``router.config`` declares them."""

    max_connections: int = 16_384
    max_uri_bytes: int = 8_192
    max_header_bytes: int = 32_768
    max_headers: int = 100
    max_body_bytes: int = 32 * 1024 * 1024
    max_bodies_bytes: int = 512 * 1024 * 1024
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    keep_alive_timeout_s: float = 75.0
    write_timeout_s: float = 30.0


class DataPlane(StrEnum):
    """Path of requests that generate."""

    SPLICE = "splice"
    """The connection's own protocol passes an engine's bytes on as they came."""

    ASGI = "asgi"
    """FastAPI, as for all others."""


@dataclass(slots=True)
class Lifecycle:
    """The end of a port, with its times as ``router.config`` declares them.

    ``draining``: balancers are warned off, requests still served; ``closed``: none is taken.
    """

    drain_delay_s: float
    grace_s: float
    draining: bool = False
    closed: bool = False
    on_drain: Callable[[], None] = lambda: None

    def drain(self) -> None:
        self.draining = True
        self.on_drain()


def is_loopback(host: str) -> bool:
    """Whether a name or an address, without port, can only mean this machine."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def loopback(host: str) -> str:
    """The address; ConfigError if other machines can reach it."""
    if not is_loopback(host):
        raise ConfigError(
            f"admin_host {host} can be reached from other machines, and no keys guard the admin "
            "port: give --admin-key-file, or 127.0.0.1, ::1 or localhost; from elsewhere, forward "
            "a port to it: ssh -L PORT:127.0.0.1:PORT"
        )
    return host
