"""systemd's socket activation and notifications.

It speaks the protocols of sd_listen_fds(3) and sd_notify(3); outside systemd it has no effect.
"""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Collection

from router.core.errors import ConfigError

_FIRST_FD = 3
_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
# Signals received while held.
_held: set[int] = set()


def given_sockets(names: Collection[str]) -> dict[str, socket.socket]:
    """Listening sockets that systemd opened for this process, by ``FileDescriptorName=``.

    Args:
        names: known names; a single socket of another name gets the first.

    Raises:
        ConfigError: a socket has an unknown name, or does not listen on a TCP port.
    """
    pid, count, called = (os.environ.pop(name, "") for name in _VARIABLES)
    if pid != str(os.getpid()) or not count.isdigit():
        return {}
    found = dict(zip(called.split(":"), range(_FIRST_FD, _FIRST_FD + int(count)), strict=False))
    if int(count) == 1 and not found.keys() & set(names):
        found = {next(iter(names)): _FIRST_FD}
    if len(found) < int(count) or not found.keys() <= set(names):
        raise ConfigError(
            f"systemd gave sockets called {called or 'nothing'}: give each its own "
            f"FileDescriptorName=, of {' and '.join(names)}"
        )
    listeners = {}
    for name, number in found.items():
        os.set_inheritable(number, False)
        listener = listeners[name] = socket.socket(fileno=number)
        tcp = listener.family in (socket.AF_INET, socket.AF_INET6)
        if not (tcp and listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)):
            raise ConfigError(
                f"systemd's socket {name} does not listen on a TCP port: ListenStream="
            )
    return listeners


def hold_hangups() -> None:
    """Hold SIGHUP until ``take_hangups``."""
    # A mask alone is not enough: threads started earlier by libraries have their own.
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        signal.signal(signal.SIGHUP, lambda number, _: _held.add(number))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})


def take_hangups() -> None:
    """Deliver SIGHUP again, to the present handler; a held signal comes at once.

    One that an older thread takes while a loop's handler is being added may come twice.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    if _held:
        _held.clear()
        signal.raise_signal(signal.SIGHUP)


async def beat() -> None:
    """Notify systemd's watchdog (``WatchdogSec=``), if any, from the event loop."""
    watched, longest_us = os.environ.get("WATCHDOG_PID"), os.environ.get("WATCHDOG_USEC", "")
    if watched not in (None, str(os.getpid())) or not longest_us.isdigit():
        return
    while True:
        # A watching process that hangs must not block this one.
        notify("WATCHDOG=1", socket.MSG_DONTWAIT)
        await asyncio.sleep(int(longest_us) / 4e6)


def notify(state: str, flags: int = 0) -> None:
    """Send a state such as ``READY=1`` to systemd, if it listens."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    # A service that cannot notify still serves.
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as teller:
        teller.connect(address)
        teller.send(state.encode(), flags)
