"""What it costs the router to be looked at: by the status page, and by a scraper beside it.

    python tests/bench/bench_page.py [--windows 8] [--seconds 6] [--json FILE]

An emulated fleet behind `evenstep serve`, which streams a replay's answers. Windows alone and
watched take turns. CPU time is that of the router's threads; figures are medians over the windows.

page: 64 workers; one viewer reads the page's states, one a second. Limit: 5 % of a core more. With
a Chromium: the CPU time of its processes while it shows the page.

tokens: 8 workers, a token an event; a viewer, and a scraper of /metrics once a second. CPU time of
the router by the tokens that it streams. Limit: 3 % more.
"""

import argparse
import contextlib
import json
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import httpx
import msgspec

from loadgen.emulator.emulator_settings import EmulatorSettings
from loadgen.report.origin import EMULATION, SERVING, Engines, origin
from router.admin.facts import Footing
from router.admin.page_state import Status
from router.core.events import WorkerUp
from router.core.types import WorkerSpec
from tests.support.browser import browsing, find
from tests.support.figure_files import write_figures
from tests.support.fleet import running_fleet, worker_flags
from tests.support.replays import replaying
from tests.support.router_bench.targets import cpu_s
from tests.support.scraped import Bench
from tests.support.server import Server, free_port, running_router

CODE = (
    *SERVING,
    *EMULATION,
    "router/admin",
    "router/api",
    "router/metrics",
    "tests/bench/bench_page.py",
)

TOKENS = re.compile(r"^evenstep_output_tokens_total{.*} (\S+)$", re.MULTILINE)
FILLING_S = 8.0
# Wall seconds a step, about: 0.2 with many workers, which share this machine with the router.
PAGE_FLEET = ("--workers", "64", "--slots", "4", "--time-scale", "40")
TOKEN_FLEET = ("--workers", "8", "--slots", "32", "--time-scale", "6")

Watcher = Callable[[threading.Event], None]


@dataclass(frozen=True)
class Router:
    """A router under load."""

    server: Server
    admin: str

    def cpu_s(self) -> float:
        return cpu_s([self.server.process.pid])

    def tokens(self) -> float:
        """Output tokens so far."""
        return sum(float(value) for value in TOKENS.findall(self.server.get("/metrics").text))

    def view(self, stop: threading.Event) -> None:
        """One viewer of the page's states."""
        with httpx.stream("GET", f"{self.admin}/events", timeout=30) as answer:
            for _ in answer.iter_lines():
                if stop.is_set():
                    return

    def state_bytes(self) -> int:
        """Size of one state."""
        with httpx.stream("GET", f"{self.admin}/events", timeout=30) as answer:
            return next(len(line) for line in answer.iter_lines() if line.startswith("data:"))

    def scrape(self, stop: threading.Event) -> None:
        """A scraper, once a second."""
        with httpx.Client(timeout=30) as client:
            while not stop.wait(1.0):
                client.get(f"{self.server.url}/metrics").raise_for_status()


@dataclass(frozen=True)
class Window:
    """CPU time of the router in a while, and the tokens that it streamed."""

    wall_s: float
    cpu_s: float
    tokens: float

    @property
    def share(self) -> float:
        return self.cpu_s / self.wall_s

    @property
    def us_per_token(self) -> float:
        return self.cpu_s / self.tokens * 1e6


@contextlib.contextmanager
def loaded(fleet_flags: Sequence[str], clients: int) -> Iterator[Router]:
    """A router before an emulated fleet, streaming."""
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        traffic = ("--arrivals", f"closed:{clients}", "--max-tokens", "400", "--requests", "60000")
        with (
            running_fleet(folder, *fleet_flags) as fleet,
            running_router(folder, "--admin-port", f"{port}", *worker_flags(fleet)) as server,
            replaying(server.url, folder, *traffic),
        ):
            time.sleep(FILLING_S)
            yield Router(server, f"http://127.0.0.1:{port}")


def window(router: Router, seconds: float, watchers: Sequence[Watcher]) -> Window:
    """One, with these watching."""
    stop = threading.Event()
    threads = [threading.Thread(target=watcher, args=(stop,)) for watcher in watchers]
    for thread in threads:
        thread.start()
    time.sleep(1.0)  # to connect
    tokens, began_cpu_s, began_s = router.tokens(), router.cpu_s(), time.monotonic()
    time.sleep(seconds)
    wall_s, used_s = time.monotonic() - began_s, router.cpu_s() - began_cpu_s
    streamed = router.tokens() - tokens
    stop.set()
    for thread in threads:
        thread.join()
    return Window(wall_s, used_s, streamed)


def compared(
    router: Router, windows: int, seconds: float, watchers: Sequence[Watcher]
) -> tuple[list[Window], list[Window]]:
    """Windows alone and watched, in turns that begin with either."""
    alone: list[Window] = []
    watched: list[Window] = []
    for turn in range(windows):
        order = [(alone, ()), (watched, watchers)]
        for found, by in order if turn % 2 else order[::-1]:
            found.append(window(router, seconds, by))
    return alone, watched


def told(name: str, values: Sequence[float]) -> dict[str, object]:
    """Median of the pairs of windows, and all pairs."""
    return {name: median(values), f"{name}_of_each_pair": sorted(values)}


def page(windows: int, seconds: float) -> dict[str, object]:
    """What a viewer costs with many workers."""
    with loaded(PAGE_FLEET, 64 * 5) as router:
        alone, watched = compared(router, windows, seconds, [router.view])
        found: dict[str, object] = {
            "workers": 64,
            "state_bytes": router.state_bytes(),
            "state_cpu_ms": state_cpu_ms(64),
            "cpu_share_alone": median(each.share for each in alone),
            "cpu_share_viewed": median(each.share for each in watched),
            **told(
                "cpu_share_more",
                [b.share - a.share for a, b in zip(alone, watched, strict=True)],
            ),
        }
        program = find()
        if program is not None:
            found["chromium_cpu_share"] = chromium_share(router, program, seconds)
    return found


def state_cpu_ms(workers: int) -> float:
    """CPU time of reading and writing one state."""
    specs = [WorkerSpec(f"w{n}", f"http://h:{n}", group="g", rank=n) for n in range(workers)]
    bench = Bench(specs)
    for spec in specs:
        bench.dispatcher.apply(WorkerUp(spec.id))
    bench.step(1, **{spec.id: 100 for spec in specs})
    deciders = bench.dispatcher.deciders
    status, footing = Status(bench.dispatcher.cluster, time.monotonic, deciders), Footing("jsq")
    taken = []
    for _ in range(50):
        began = time.thread_time()
        msgspec.json.encode(status.read(footing))
        taken.append((time.thread_time() - began) * 1e3)
    return median(taken)


def chromium_share(router: Router, program: str, seconds: float) -> float:
    """CPU time of a Chromium that shows the page, in cores."""
    before = chromiums()
    with browsing(program) as tab:
        tab.size(1360, 900)
        tab.open(f"{router.admin}/")
        tab.wait_for("document.getElementById('status').dataset.state === 'live'")
        time.sleep(10)
        pids = chromiums() - before
        began = cpu_s(pids)
        time.sleep(seconds)
        return (cpu_s(pids) - began) / seconds


def chromiums() -> set[int]:
    """Processes of any Chromium here."""
    found = set()
    for comm in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            if comm.read_text().startswith("chromium"):
                found.add(int(comm.parent.name))
    return found


def tokens(windows: int, seconds: float) -> dict[str, object]:
    """What a viewer and a scraper add to the CPU time of a token."""
    with loaded(TOKEN_FLEET, 8 * 40) as router:
        alone, watched = compared(router, windows, seconds, [router.view, router.scrape])
    return {
        "workers": 8,
        "tokens_per_s": median(each.tokens / each.wall_s for each in alone),
        "cpu_share_alone": median(each.share for each in alone),
        "us_per_token_alone": median(each.us_per_token for each in alone),
        "us_per_token_watched": median(each.us_per_token for each in watched),
        **told(
            "ratio",
            [b.us_per_token / a.us_per_token for a, b in zip(alone, watched, strict=True)],
        ),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--windows", type=int, default=8)
    options.add_argument("--seconds", type=float, default=6.0)
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    figures = {
        "windows": given.windows,
        "seconds": given.seconds,
        "page": page(given.windows, given.seconds),
        "tokens": tokens(given.windows, given.seconds),
    }
    print(json.dumps(figures, indent=1))
    if given.json is not None:
        write_figures(
            given.json, figures, origin(Engines.EMULATED, CODE, EmulatorSettings().described())
        )


if __name__ == "__main__":
    main()
