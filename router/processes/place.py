"""What the processes of one router share: a folder of sockets, and their word to the supervisor."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Place:
    """A process's place among the others, told on its command line.

    Attributes:
        folder: of the Unix sockets, for this user alone.
        proxies: how many there are.
        restarts: how often this process has been started anew.
        listener: file number of the socket that it listens on; None: it does not.
        slot: which of the proxies it is.
        inherited: the listening socket is somebody's who goes on listening.
    """

    folder: str
    proxies: int
    restarts: int = 0
    listener: int | None = None
    slot: int = 0
    inherited: bool = False

    @property
    def decider(self) -> str:
        """Where proxies reach the deciding process."""
        return str(Path(self.folder) / "decider")

    @property
    def http(self) -> str:
        """Where they reach its HTTP application."""
        return str(Path(self.folder) / "http")

    def argument(self) -> str:
        """As it stands on a command line."""
        return json.dumps(asdict(self))


def place_of(argument: str) -> Place:
    """What a command line says."""
    return Place(**json.loads(argument))


def interpreter() -> list[str]:
    """What runs modules of this router: they are looked for where this process has its own from."""
    beside_folder = sys.path[0] in ("", str(Path.cwd()))
    return [sys.executable, *(() if beside_folder else ("-P",)), "-m"]


def orphaned() -> bool:
    """Whether the supervisor is gone: it holds the other end of stdin, and says nothing there."""
    return bool(select.select((sys.stdin,), (), (), 0)[0])


def end_with_supervisor() -> None:
    """End as if asked to as soon as the supervisor is gone; see ``orphaned``."""
    loop = asyncio.get_running_loop()

    def gone() -> None:
        loop.remove_reader(sys.stdin.fileno())
        os.kill(os.getpid(), signal.SIGTERM)

    loop.add_reader(sys.stdin.fileno(), gone)
