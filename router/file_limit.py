"""The process's limit on open files, of which each connection takes one.

The kernel assigns the lowest free number, so a new connection's number tells how many are left. The
last numbers are a reserve for error answers and for files that libraries open.
"""

import errno
import logging
import resource
import time

from router.core.errors import DescriptorsError

log = logging.getLogger(__name__)

# Errors on opening a file when the process or the machine has too many.
LACKS = frozenset({errno.EMFILE, errno.ENFILE})

# Listeners, state streams, the log, and files of libraries.
_OTHERS = 256
_KEPT = 64
_SAID_EVERY_S = 60.0

_said_s = -_SAID_EVERY_S


def allow_connections(clients: int) -> None:
    """Raise the soft limit so that so many clients, each with an engine connection, fit.

    Shells give 1,024 by default. A hard limit that is too low is logged.
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
    """True if a newly opened connection exceeds the limit.

    Args:
        fileno: its descriptor.
        parts: parts of the reserve that it may not use. An engine's connection may not use the last
            part. A client's gets 503 from the first of three parts on, and the router waits until
            the answer is read; in the last two it is closed at once.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return False
    return fileno >= most - parts * min(_KEPT, most // 8)


def descriptors_lacking() -> DescriptorsError:
    """The error for a client; a warning with the remedy is logged once a minute."""
    global _said_s
    if time.monotonic() - _said_s >= _SAID_EVERY_S:
        _said_s = time.monotonic()
        log.warning(
            "no file descriptors are left for connections (%d are allowed): requests are answered "
            "503; raise ulimit -n, LimitNOFILE= of a systemd unit, or the container's limit",
            resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        )
    return DescriptorsError("the router has no file descriptors left for connections; retry later")
