"""The parent of a router's processes.

It holds the listening sockets: connections queued in a dead proxy's socket wait for its
successor. Processes report to it as to systemd (``NOTIFY_SOCKET``), and end with it.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from router import systemd
from router.logs import start_logging
from router.processes.process_args import Place, interpreter

log = logging.getLogger(__name__)

_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 5.0
# After so long a life a failure is not a repetition.
_LONG_S = 10.0
# After such a silence a process hangs.
_HUNG_S, _HUNG_STARTING_S = 30, 180
_LOOK_S = 1
_MOST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Plan:
    """Processes to run, passed on the supervisor's command line; sockets are file descriptors."""

    listeners: Sequence[int]  # of the clients' port, one for each proxy
    admin: int | None
    inherited: bool  # another process owns the listening socket and keeps listening
    log_level: str
    log_format: str

    @property
    def sockets(self) -> set[int]:
        return {*self.listeners, *(() if self.admin is None else (self.admin,))}

    def command(self, flags: Sequence[str]) -> list[str]:
        module = "router.processes.supervisor"
        return [*interpreter(), module, json.dumps(asdict(self)), *flags]


@dataclass(slots=True)
class _Child:
    """A process; ``silent_s`` counts only while the supervisor itself runs."""

    name: str
    module: str
    place: Place
    flags: Sequence[str] = ()
    process: asyncio.subprocess.Process | None = None
    ready: bool = False
    silent_s: int = 0

    def command(self) -> list[str]:
        return [*interpreter(), self.module, self.place.argument(), *self.flags]


class Supervisor:
    """Starts the processes, restarts those that fail, and ends them at a signal."""

    def __init__(self, plan: Plan, flags: Sequence[str], folder: str) -> None:
        self._plan = plan
        self._folder = folder
        place = Place(folder, len(plan.listeners), inherited=plan.inherited)
        deciding = replace(place, listener=plan.admin)
        self._children = [_Child("the deciding process", _DECIDING, deciding, flags)]
        for slot, listener in enumerate(plan.listeners):
            own = replace(place, listener=listener, slot=slot)
            self._children.append(_Child(f"proxy {slot}", _PROXYING, own))
        self._ending = asyncio.Event()
        self._served = False
        self._status = 0

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        systemd.take_hangups()
        with contextlib.ExitStack() as sockets:
            for child in self._children:
                sockets.enter_context(self._heard(child))
            watching = [asyncio.create_task(one) for one in (self._watch(), systemd.beat())]
            await asyncio.gather(*map(self._keep, self._children))
            for task in watching:
                task.cancel()
        return self._status

    async def _watch(self) -> None:
        """Kill processes that hang; the first start may take any time."""
        while True:
            await asyncio.sleep(_LOOK_S)
            for child in self._children if self._served or self._ending.is_set() else ():
                # Counted, not timed: if the whole machine was suspended, nothing hangs.
                child.silent_s += _LOOK_S
                limit_s = _HUNG_S if child.ready else _HUNG_STARTING_S
                if child.process is not None and child.silent_s >= limit_s:
                    log.error("%s hangs: silent for %d s; it is killed", child.name, child.silent_s)
                    child.silent_s = 0
                    self._signal(signal.SIGKILL, [child])

    async def _keep(self, child: _Child) -> None:
        delay_s = _FIRST_DELAY_S
        while not self._ending.is_set():
            started_s = time.monotonic()
            status = await self._run(child)
            if self._ending.is_set():
                break
            if not self._served:  # a failed first start would fail again
                self._status = status if status > 0 else 1
                self._end(signal.SIGTERM)
                break
            log.error("%s ended with status %d; it is started again", child.name, status)
            lived_s = time.monotonic() - started_s
            delay_s = _FIRST_DELAY_S if lived_s > _LONG_S else min(2 * delay_s, _LONGEST_DELAY_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), delay_s)
            child.place = replace(child.place, restarts=child.place.restarts + 1)

    async def _run(self, child: _Child) -> int:
        own = child.place.listener
        told = {"NOTIFY_SOCKET": self._address(child), "WATCHDOG_USEC": str(_HUNG_S * 1_000_000)}
        environment = {k: v for k, v in os.environ.items() if k != "WATCHDOG_PID"}
        systemd.hold_hangups()  # the child must block SIGHUP from its first moment
        try:
            child.process = await asyncio.create_subprocess_exec(
                *child.command(),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=() if own is None else (own,),
                env={**environment, **told},
            )
        except OSError as error:  # no memory, or too many processes: a later attempt may succeed
            log.error("%s cannot be started: %s", child.name, error)  # noqa: TRY400 - says it all
            return 1
        finally:
            systemd.take_hangups()
        child.silent_s = 0
        if self._ending.is_set():  # the signal went out before this process existed
            self._signal(signal.SIGTERM, [child])
        status = await child.process.wait()
        child.process, child.ready = None, False
        return status

    def _end(self, number: int) -> None:
        if not self._ending.is_set():
            self._ending.set()
            systemd.notify("STOPPING=1")
            # Nothing may connect to a socket whose process no longer listens.
            for listener in self._plan.sockets:
                os.close(listener)
        self._signal(number, self._children)

    def _reload(self) -> None:
        """Forward SIGHUP to the process that reads settings; a starting one holds it."""
        if not self._ending.is_set():
            self._signal(signal.SIGHUP, self._children[:1])

    def _signal(self, number: int, children: Sequence[_Child]) -> None:
        for child in children:
            if child.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    child.process.send_signal(number)

    # reports of the processes

    def _address(self, child: _Child) -> str:
        return str(Path(self._folder) / f"notify-{self._children.index(child)}")

    @contextlib.contextmanager
    def _heard(self, child: _Child) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
            ear.bind(self._address(child))
            ear.setblocking(False)
            loop.add_reader(ear, self._hear, child, ear)
            yield
            loop.remove_reader(ear)

    def _hear(self, child: _Child, ear: socket.socket) -> None:
        state = ear.recv(_MOST_BYTES).decode(errors="replace")
        child.silent_s = 0
        if state == "WATCHDOG=1":
            return
        if state.startswith("READY=1"):
            child.ready = True
        if self._served and child is self._children[0]:
            systemd.notify(state)  # it reads its settings again
        elif not self._served and all(each.ready for each in self._children):
            self._served = True
            systemd.notify("READY=1")


_DECIDING, _PROXYING = "router.processes.decider_process", "router.processes.proxy_process"


def main() -> None:
    """Run the supervisor; its arguments are its plan, then the flags of ``evenstep serve``."""
    plan = Plan(**json.loads(sys.argv[1]))
    start_logging(plan.log_level, plan.log_format)

    async def supervise(folder: str) -> int:
        return await Supervisor(plan, sys.argv[2:], folder).run()

    with tempfile.TemporaryDirectory(prefix="evenstep-") as folder:
        status = asyncio.run(supervise(folder))
    raise SystemExit(status)


if __name__ == "__main__":
    main()
