"""How many files the process may have open: every connection is one.

The kernel gives out the lowest number that is free, so that a new connection's own number says how
many are left. The last ones are a reserve: for answers to clients that are refused, and for files
that libraries open.
"""

from __future__ import annotations

import errno
import logging
import resource
import time

from router.errors import DescriptorsError

log = logging.getLogger(__name__)

# Errors of opening a file where the process, or the machine, has too many.
LACKS = frozenset({errno.EMFILE, errno.ENFILE})

# Listeners, state streams, the log, and what libraries open.
_OTHERS = 256
_KEPT = 64
_SAID_EVERY_S = 60.0

_said_s = -_SAID_EVERY_S


def allow_connections(clients: int) -> None:
    """Raise the soft limit so that so many clients, each with an engine behind, find room.

    Shells give 1,024 by default. If the hard limit is below that, the log says so.
    """
    wanted = 2 * clients + _OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < wanted:
        log.warning(
            "%d open files are allowed, and --max-connections %d may need %d: raise ulimit -Hn",
            *(most, clients, wanted),
        )


def scarce(fileno: int, parts: int) -> bool:
    """Whether a connection that has just been opened is one too many.

    Args:
        fileno: its descriptor.
        parts: how many parts of the reserve it may not use. An engine's connection may not use
            the last one. A client's is refused from the first of three on: with 503, for which
            the router waits until it has been read; in the last two it closes at once.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return False
    return fileno >= most - parts * min(_KEPT, most // 8)


def descriptors_lacking() -> DescriptorsError:
    """The error for a client; the log says it once a minute, and what to do."""
    global _said_s
    if time.monotonic() - _said_s >= _SAID_EVERY_S:
        _said_s = time.monotonic()
        log.warning(
            "no file descriptors are left for connections (%d are allowed): requests are answered "
            "503; raise ulimit -n, LimitNOFILE= of a systemd unit, or the container's limit",
            resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        )
    return DescriptorsError("the router has no file descriptors left for connections; retry later")
