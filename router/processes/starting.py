"""Turns ``evenstep serve`` into the supervisor of several processes."""

import os
from collections.abc import Sequence

from router.config.serve_settings import ServeSettings
from router.core.errors import ConfigError
from router.http import uvicorn_api
from router.logs import start_logging
from router.processes.supervisor import Plan
from router.serve.sockets import opened


def start(settings: ServeSettings, flags: Sequence[str]) -> None:
    """Bind the ports, then replace this process by the supervisor, free of this one's imports.

    ConfigError: an address cannot be bound, or uvicorn lacks what splice needs.
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
