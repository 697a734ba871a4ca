"""How ``evenstep serve`` becomes the supervisor of several processes."""

from __future__ import annotations

import os
from collections.abc import Sequence

from router.errors import ConfigError
from router.http import uvicorn_api
from router.logs import start_logging
from router.ports import opened
from router.processes.supervisor import Plan
from router.settings.serve import ServeSettings


def start(settings: ServeSettings, flags: Sequence[str]) -> None:
    """Bind the ports, then be the supervisor, in this very process and without what it imported.

    Args:
        settings: what the flags and all else come to.
        flags: of ``evenstep serve``; whoever decides reads them anew.

    Raises:
        ConfigError: an address cannot be listened on, or uvicorn is not as it should be.
    """
    start_logging(settings.log_level, settings.log_format)
    if lacking := uvicorn_api.missing():
        raise ConfigError(
            f"--processes above 1 needs --data-plane splice, and uvicorn lacks {', '.join(lacking)}"
        )
    with opened(settings) as ports:
        for listener in ports.listeners:
            listener.set_inheritable(True)
        if ports.admin is not None:
            ports.admin.set_inheritable(True)
        numbers = [listener.fileno() for listener in ports.listeners]
        if ports.inherited:
            numbers *= settings.processes
        admin = None if ports.admin is None else ports.admin.fileno()
        ports.announce(settings, settings.tls)
        plan = Plan(numbers, admin, ports.inherited, settings.log_level, settings.log_format)
        command = plan.command(flags)
        os.execv(command[0], command)  # noqa: S606 - there is no shell
