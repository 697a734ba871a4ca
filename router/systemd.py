"""What systemd gives a service and hears from it: listening sockets, and how it does.

The protocols of sd_listen_fds(3) and sd_notify(3); outside of systemd none of it does anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Collection

from router.errors import ConfigError

_FIRST_FD = 3
_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
# Signals that came while they were held.
_held: set[int] = set()


def given_sockets(names: Collection[str]) -> dict[str, socket.socket]:
    """Listening sockets that systemd has opened for this process, by ``FileDescriptorName=``.

    Args:
        names: those that are known; a single socket may have any name, and gets the first.

    Raises:
        ConfigError: one of an unknown name, or that does not listen on a TCP port.
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
    return {name: _listening(name, number) for name, number in found.items()}


def hold_hangups() -> None:
    """Hold SIGHUP, in this process and those that it becomes or starts, until it is taken."""
    # A mask alone does not hold it: threads that libraries have started before have their own.
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        signal.signal(signal.SIGHUP, _hold)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})


def take_hangups() -> None:
    """Take SIGHUP from now on, by the handler set by now; one that was held comes at once."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    if _held:
        _held.clear()
        signal.raise_signal(signal.SIGHUP)


def _hold(number: int, _: object) -> None:
    _held.add(number)


async def beat() -> None:
    """Tell systemd now and then that the event loop runs, if it watches (``WatchdogSec=``)."""
    watched, longest_us = os.environ.get("WATCHDOG_PID"), os.environ.get("WATCHDOG_USEC", "")
    if watched not in (None, str(os.getpid())) or not longest_us.isdigit():
        return
    while True:
        # A watching process that hangs itself must not hold up this one.
        notify("WATCHDOG=1", socket.MSG_DONTWAIT)
        await asyncio.sleep(int(longest_us) / 4e6)


def notify(state: str, flags: int = 0) -> None:
    """Tell systemd, as in ``READY=1``; nothing if it does not ask to be told."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    # A service that cannot tell how it does still serves.
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as teller:
        teller.connect(address)
        teller.send(state.encode(), flags)


def _listening(name: str, number: int) -> socket.socket:
    os.set_inheritable(number, False)
    listener = socket.socket(fileno=number)
    tcp = listener.family in (socket.AF_INET, socket.AF_INET6)
    if not (tcp and listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)):
        raise ConfigError(f"systemd's socket {name} does not listen on a TCP port: ListenStream=")
    return listener
