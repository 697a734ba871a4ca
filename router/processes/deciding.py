"""The deciding process of ``evenstep serve --processes N``: pools, policies, health, metrics.

It serves what proxies pass on whole by the same application as a router of one process.
"""

from __future__ import annotations

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
from router.access.keys import KeyRing
from router.cli import report_errors
from router.file_limit import allow_connections
from router.http.limits import HttpLimits
from router.listening import server_config
from router.logs import start_logging
from router.main_server import MainServer
from router.processes.counts import ProcessCounts
from router.processes.link import Books
from router.processes.links import Links
from router.processes.place import Place, end_with_supervisor, orphaned, place_of
from router.processes.telling import Teller
from router.serve_command import read_settings
from router.server import Built, build
from router.settings.flags import ConfigFile, with_flags
from router.settings.serve import ServeSettings

# Header fields of a request that is passed on which its client may not have sent.
_SAID_BYTES, _SAID_FIELDS = 256, 3


def run(settings: ServeSettings, read: Callable[[], ServeSettings], place: Place) -> None:
    """Decide until SIGTERM, and until the proxies have ended.

    Args:
        settings: those to begin with.
        read: reads them anew.
        place: among the others.
    """
    start_logging(settings.log_level, settings.log_format)
    counts = ProcessCounts(decider_restarts=place.restarts, wanted=place.proxies)
    with contextlib.ExitStack() as sockets:
        admin = None
        if place.listener is not None:
            admin = sockets.enter_context(socket.socket(fileno=place.listener))
        built = build(settings, read, settings.tls, admin, counts)
        allow_connections(settings.max_connections)
        links = _links(built, place, counts)
        built.made.relay.attempts.watchers.append(links.recall)
        built.reload.followers = links
        config = server_config(built.app, _inside(settings), hot=built.hot, path=place.http)
        _Server(config, built, links).run()
    if orphaned():  # nobody else tidies up
        shutil.rmtree(place.folder, ignore_errors=True)


def _inside(settings: ServeSettings) -> HttpLimits:
    """What proxies may send: what clients may, and what is said on the way."""
    limits = settings.http_limits
    head, fields = limits.max_header_bytes + _SAID_BYTES, limits.max_headers + _SAID_FIELDS
    return replace(limits, max_header_bytes=head, max_headers=fields)


def _links(built: Built, place: Place, counts: ProcessCounts) -> Links:
    keys = built.access.clients
    books = Books(
        dispatcher=built.made.dispatcher,
        ring=lambda: KeyRing() if keys is None else keys.ring,
        limits=built.access.limits,
        trouble=built.made.health.probe_now,
        http=built.counts,
        processes=counts,
        clock=time.monotonic,
    )
    return Links(place.decider, books, Teller(built, place.proxies), counts)


class _Server(MainServer):
    """Serves the proxies as long as there are any."""

    def __init__(self, config: uvicorn.Config, built: Built, links: Links) -> None:
        super().__init__(config, built.lifecycle, built.reload, others=lambda: bool(links.proxies))
        self._links = links
        self._linking: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn; proxies may come when there is something to tell them."""
        await super().startup(sockets)
        end_with_supervisor()
        self._linking = asyncio.create_task(self._links.run())


def main() -> None:
    """Run the process: its place, then the flags of ``evenstep serve``."""
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
