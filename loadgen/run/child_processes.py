"""Programs as child processes that end with their block; mostly ``evenstep``."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self, TypeVar

from router.core.errors import ConfigError, EvenstepError

POLL_S = 0.05
GRACE_S = 15.0
# Below the range from which systems take the ports of outgoing connections.
PORTS = range(18000, 32000)

T = TypeVar("T")


class Child:
    """``evenstep``, or the program at a path, in its own process group; ended with its block."""

    def __init__(self, arguments: Sequence[str], log: Path, program: str | None = None) -> None:
        evenstep = [sys.executable, "-m", "router.cli"]
        self._command = [*(evenstep if program is None else [program]), *arguments]
        self._name = f"evenstep {arguments[0]}" if program is None else Path(program).name
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            with _held_signals(), self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except BaseException:
            # A held interrupt arrives here, when the process is known and can be ended.
            if self._process is not None:
                self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return None if self._process is None else self._process.poll()

    def until(self, ready: Callable[[], T | None], timeout_s: float) -> T:
        """Wait for a value of ``ready``; EvenstepError: the process ended, or took too long."""
        deadline_s = time.monotonic() + timeout_s
        while (found := ready()) is None:
            self.check()
            if time.monotonic() > deadline_s:
                raise EvenstepError(
                    f"{self._name} was not ready within {timeout_s:g} s: {self.last_words}"
                )
            time.sleep(POLL_S)
        return found

    def check(self) -> None:
        """Check that it runs."""
        if self.exit_code is not None:
            raise EvenstepError(f"{self._name} ended with {self.exit_code}: {self.last_words}")

    def finish(self, timeout_s: float) -> int:
        """Wait for its end and return its exit code; interrupt it after ``timeout_s``."""
        process = self._started
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.end(signal.SIGINT)
        return process.wait()

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End it by a signal, then kill it."""
        process = self._started
        try:
            if process.poll() is None:
                self._signal(number)
                process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if process.poll() is None:
                self._signal(signal.SIGKILL)
                process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # the whole group has ended
            os.killpg(self._started.pid, number)

    @property
    def _started(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    @property
    def last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "no output")


def free_ports(count: int) -> int:
    """Return the first of ``count`` consecutive free ports."""
    for first in random.sample(PORTS[:-count], 200):
        if all(_is_free(port) for port in range(first, first + count)):
            return first
    raise ConfigError(f"no {count} consecutive free ports between {PORTS[0]} and {PORTS[-1]}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@contextlib.contextmanager
def _held_signals() -> Iterator[None]:
    """Hold the signals that end the demo until the block has ended.

    By handlers: a mask would hold none where the process has other threads.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers run in the main thread alone
        return
    held: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    # One that is ignored stays so, for the child too.
    caught = [number for number, now in before.items() if now not in (signal.SIG_IGN, None)]
    for number in caught:
        signal.signal(number, lambda number, _: held.append(number))
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, before[number])
        for each in held:
            signal.raise_signal(each)


@contextlib.contextmanager
def signals_as_interrupts() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a block as Ctrl-C does, so that its children end too."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
