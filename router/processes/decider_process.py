"""The deciding process of ``evenstep serve --processes N``: pools, policies, health, metrics.

Requests that proxies forward whole get the same application as in a single-process router.
"""

import asyncio
import contextlib
import shutil
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import typer
import uvicorn

from router import systemd
from router.config.flags import ConfigFile, read_settings, with_flags
from router.config.serve_settings import ServeSettings
from router.core.process_counts import ProcessCounts
from router.file_limit import allow_connections
from router.http.listening import server_config
from router.logs import report_errors, start_logging
from router.processes.directory_builder import Teller
from router.processes.link import DeciderParts
from router.processes.process_args import Place, end_with_supervisor, orphaned, place_of
from router.processes.proxy_links import Links
from router.serve.main_server import MainServer
from router.serve.router import Router

# Bytes and number of the header fields that proxies add to forwarded requests.
_SAID_BYTES, _SAID_FIELDS = 256, 3


def run(settings: ServeSettings, read: Callable[[], ServeSettings], place: Place) -> None:
    """Decide until SIGTERM and until all proxies have ended."""
    start_logging(settings.log_level, settings.log_format)
    counts = ProcessCounts(decider_restarts=place.restarts, wanted=place.proxies)
    with contextlib.ExitStack() as sockets:
        admin = None
        if place.listener is not None:
            admin = sockets.enter_context(socket.socket(fileno=place.listener))
        router = Router(settings, read, settings.tls, admin, counts)
        allow_connections(settings.max_connections)
        parts = DeciderParts(
            dispatcher=router.dispatcher,
            keys=router.access.clients,
            limits=router.access.limits,
            trouble=router.health.probe_now,
            http=router.counts,
            processes=counts,
            clock=time.monotonic,
        )
        links = Links(place.decider, parts, Teller(router, place.proxies), counts)
        router.relay.attempts.watchers.append(links.recall)
        router.reload.followers = links
        limits = settings.http_limits
        inside = replace(
            limits,
            max_header_bytes=limits.max_header_bytes + _SAID_BYTES,
            max_headers=limits.max_headers + _SAID_FIELDS,
        )
        config = server_config(router.app, inside, hot=router.hot, path=place.http)
        _Server(config, router, links).run()
    if orphaned():  # no other process removes it
        shutil.rmtree(place.folder, ignore_errors=True)


class _Server(MainServer):
    def __init__(self, config: uvicorn.Config, router: Router, links: Links) -> None:
        super().__init__(
            config, router.lifecycle, router.reload, others=lambda: bool(links.proxies)
        )
        self._links = links
        self._linking: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept proxies only when the directory is complete."""
        await super().startup(sockets)
        end_with_supervisor()
        self._linking = asyncio.create_task(self._links.run())


def main() -> None:
    """Run the process; its arguments are its place, then the flags of ``evenstep serve``."""
    systemd.hold_hangups()
    place, *flags = sys.argv[1:]

    def decide(context: typer.Context, *, config: ConfigFile = None, **_: object) -> None:
        read = partial(read_settings, context, config)
        run(read(), read, place_of(place))

    with_flags(decide)
    command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    command.command()(decide)
    report_errors(partial(command, flags))


if __name__ == "__main__":
    main()
