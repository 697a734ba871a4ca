"""``evenstep`` with a heartbeat in the router's own event loop, for the bench of many streams.

    python -m tests.support.router_bench.heartbeat FILE serve --worker …

A timer fires every 2 ms. How late it is says how long the loop was away, and the CPU time of its
thread since the last beat how much of that the router itself was busy: the rest is the machine's.
At SIGUSR1 the file gets what was measured since the one before, as JSON.
"""

import asyncio
import json
import signal
import sys
import time
from pathlib import Path

from router import cli
from router.serve.main_server import MainServer

PERIOD_S = 0.002
_SHARES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}


class Heartbeat:
    """Beats from the start of a loop to its end.

    Args:
        loop: whose lateness it is.
        file: for what is told.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, file: Path) -> None:
        self._loop = loop
        self._file = file
        self._late_s: list[float] = []
        self._busy_s: list[float] = []
        self._beat(time.perf_counter(), time.thread_time())

    def tell(self) -> None:
        """Write what was measured since the last time; whoever reads sees a whole file or none."""
        told = {"late": _shares(self._late_s), "busy": _shares(self._busy_s)}
        self._late_s, self._busy_s = [], []
        whole = self._file.with_suffix(".part")
        whole.write_text(json.dumps(told))
        whole.rename(self._file)

    def _beat(self, due_s: float, used_s: float) -> None:
        # The loop's own clock stands still while a callback runs.
        now_s, spent_s = time.perf_counter(), time.thread_time()
        self._late_s.append(now_s - due_s)
        self._busy_s.append(spent_s - used_s)
        self._loop.call_later(PERIOD_S, self._beat, now_s + PERIOD_S, spent_s)


def _shares(values_s: list[float]) -> dict[str, float]:
    """What some shares of them stay below, in milliseconds."""
    values = sorted(values_s)
    told = {name: 1e3 * values[int(share * len(values))] for name, share in _SHARES.items()}
    return {**told, "longest": 1e3 * values[-1]}


def main() -> None:
    file = Path(sys.argv.pop(1))
    serve = MainServer.main_loop

    async def watched(server: MainServer) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, Heartbeat(loop, file).tell)
        await serve(server)

    MainServer.main_loop = watched  # type: ignore[assignment, method-assign]
    cli.main()


if __name__ == "__main__":
    main()
