from __future__ import annotations

from ipaddress import ip_address

from router.core.errors import ConfigError


def is_loopback(host: str) -> bool:
    """Whether a name or an address, without a port, can only mean this machine."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def loopback(host: str) -> str:
    """The address, if only this machine can reach it.

    Raises:
        ConfigError: other machines can reach it.
    """
    if not is_loopback(host):
        raise ConfigError(
            f"admin_host {host} can be reached from other machines, and no keys guard the admin "
            "port: give --admin-key-file, or 127.0.0.1, ::1 or localhost; from elsewhere, forward "
            "a port to it: ssh -L PORT:127.0.0.1:PORT"
        )
    return host
