"""How many files the process may have open: every connection is one."""

from __future__ import annotations

import logging
import resource

log = logging.getLogger(__name__)

# Listeners, state streams, the log, and what libraries open.
_OTHERS = 256


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
