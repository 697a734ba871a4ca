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
    """A process's place among the others, passed on its command line.

    ``folder``: of the Unix sockets, private to this user. ``listener``: file descriptor of its
    listening socket. ``slot``: index of the proxy. ``inherited``: another process keeps listening.
    """

    folder: str
    proxies: int
    restarts: int = 0
    listener: int | None = None
    slot: int = 0
    inherited: bool = False

    @property
    def decider(self) -> str:
        return str(Path(self.folder) / "decider")

    @property
    def http(self) -> str:
        return str(Path(self.folder) / "http")

    def argument(self) -> str:
        return json.dumps(asdict(self))


def place_of(argument: str) -> Place:
    """Read a process's argument."""
    return Place(**json.loads(argument))


def interpreter() -> list[str]:
    """Command prefix that runs modules from this process's own source."""
    beside_folder = sys.path[0] in ("", str(Path.cwd()))
    return [sys.executable, *(() if beside_folder else ("-P",)), "-m"]


def orphaned() -> bool:
    """The supervisor is gone: it holds the other end of stdin and never writes."""
    return bool(select.select((sys.stdin,), (), (), 0)[0])


def end_with_supervisor() -> None:
    """Send this process SIGTERM once the supervisor is gone; see ``orphaned``."""
    loop = asyncio.get_running_loop()

    def gone() -> None:
        loop.remove_reader(sys.stdin.fileno())
        os.kill(os.getpid(), signal.SIGTERM)

    loop.add_reader(sys.stdin.fileno(), gone)
