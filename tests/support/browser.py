"""A headless Chromium, controlled through its DevTools protocol over two pipes."""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from router.core.errors import EvenstepError

ADVICE = "no Chromium here: on Debian, apt-get install chromium"
# Chromium refuses its sandbox as root; the pages are our own.
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
# Chromium reads commands from the first and writes answers to the second of these descriptors.
_PIPES = (3, 4)


class BrowserError(EvenstepError):
    """Chromium ended, refused a command, or took too long."""


class NavigatedError(BrowserError):
    """The page was left for another one before it answered."""


def find() -> str | None:
    """Path of a Chromium; None: not installed."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)


class Page:
    """One tab."""

    def __init__(self, commands: int, answers: int, timeout_s: float = 60.0) -> None:
        self._commands = commands
        self._answers = answers
        self._timeout_s = timeout_s
        self._number = 0
        self._received = b""
        self._events: list[dict[str, Any]] = []
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self.call("Page.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command of the protocol, and return its result.

        Raises:
            BrowserError: Chromium refused it, or did not answer in time.
        """
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + self._timeout_s
        while (answer := self._next(deadline)).get("id") != self._number:
            self._events.append(answer)
        if "error" in answer:
            reason = answer["error"]["message"]
            kind = NavigatedError if "navigated" in reason else BrowserError
            raise kind(f"Chromium refused {method}: {reason}")
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._received:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([self._answers], [], [], left_s)[0]:
                raise BrowserError(f"Chromium did not answer within {self._timeout_s:g} s")
            chunk = os.read(self._answers, 1 << 16)
            if not chunk:
                raise BrowserError("Chromium has ended")
            self._received += chunk
        message, _, self._received = self._received.partition(b"\0")
        told: dict[str, Any] = json.loads(message)
        return told

    def heard(self, *events: str) -> list[dict[str, Any]]:
        """Parameters of these events received since the last ``open``."""
        return [told["params"] for told in self._events if told.get("method") in events]

    def open(self, url: str) -> None:
        """Open an address, and wait until its files are loaded.

        Raises:
            BrowserError: the page does not exist, or did not load in time.
        """
        self._events.clear()
        failed = self.call("Page.navigate", url=url).get("errorText")
        if failed is not None:
            raise BrowserError(f"cannot open {url}: {failed}")
        deadline = time.monotonic() + self._timeout_s
        while not self.heard("Page.loadEventFired"):
            self._events.append(self._next(deadline))

    def size(self, width: int, height: int, scale: float = 1.0) -> None:
        """In CSS pixels, and device pixels per CSS pixel."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )

    def prefer(self, **features: str) -> None:
        """As in ``prefers_color_scheme="dark"``."""
        asked = [{"name": n.replace("_", "-"), "value": v} for n, v in features.items()]
        self.call("Emulation.setEmulatedMedia", features=asked)

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page; wait for a promise."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            thrown = answer["exceptionDetails"].get("exception", {})
            raise BrowserError(f"{expression}: {thrown.get('description', 'threw')}")
        return answer["result"].get("value")

    def wait_for(self, expression: str, timeout_s: float = 60.0) -> Any:
        """Wait until an expression is true in the page, and return its value."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() <= deadline:
            with contextlib.suppress(NavigatedError):  # the next page may have it
                if value := self.evaluate(expression):
                    return value
            time.sleep(0.1)
        raise BrowserError(f"not so within {timeout_s:g} s: {expression}")

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """A PNG of the whole page, or of the part in view."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))


@contextlib.contextmanager
def browsing(program: str, timeout_s: float = 60.0) -> Iterator[Page]:
    """Run a Chromium with one empty tab until the block ends."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        # The shell moves the pipes to the descriptors that Chromium expects.
        moved = f'exec "$@" {_PIPES[0]}<&{theirs_in} {_PIPES[1]}>&{theirs_out}'
        process = subprocess.Popen(
            ["bash", "-c", moved, "bash", program, *_FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Page(ours_out, ours_in, timeout_s)
        finally:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(ours_out)
            os.close(ours_in)
