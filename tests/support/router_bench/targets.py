"""What the router bench compares: this router, the Rust routers of the registry, and no router."""

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench.league.pins import PEERS, Peer

KEY = "sk-bench-0123456789abcdef"
ROUTER_CORE, OTHER_CORE = "0", "1"


@dataclass(frozen=True)
class Fleet:
    """The engines that all targets stand before.

    Attributes:
        ports: of each engine.
        snapshots: of each one's state stream.
        slots: of each engine.
    """

    ports: Sequence[int]
    snapshots: Sequence[int]
    slots: int

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.ports]


@dataclass(frozen=True)
class Target:
    """A router to be measured.

    Attributes:
        what: which one, in which version.
        command: of the port that it is to listen on and another one, of the fleet, and of a folder.
    """

    what: str
    command: Callable[[int, int, Fleet, Path], list[str]]


def _evenstep(port: int, _: int, fleet: Fleet, folder: Path, *flags: str) -> list[str]:
    """Everything that it does is on; of the log as much as the others write."""
    keys = folder / "keys"
    keys.write_text(f"bench {KEY}\n")
    workers = [
        f"--worker={url},slots={fleet.slots},snapshots=tcp://127.0.0.1:{snapshots}"
        for url, snapshots in zip(fleet.urls, fleet.snapshots, strict=True)
    ]
    started = [sys.executable, "-m", "router.cli", "serve", "--port", str(port), *workers]
    return [*started, "--api-key-file", str(keys), "--log-level", "warning", *flags]


def _with(*flags: str) -> Callable[[int, int, Fleet, Path], list[str]]:
    return lambda *place: _evenstep(*place, *flags)


def _rust(peer: Peer, *program: str) -> Callable[[int, int, Fleet, Path], list[str]]:
    """One of the registry, in an environment of its own; ``program``: below its folder of those."""

    def command(port: int, other: int, fleet: Fleet, _: Path) -> list[str]:
        binaries = peer.install() / "bin"
        first, *flags = program
        return [
            *(str(binaries / first), *flags, "--worker-urls", *fleet.urls),
            *("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(other)),
            *("--policy", "round_robin"),
        ]

    return command


_VLLM, _SGLANG = PEERS["vllm-router"], PEERS["sglang-router"]
_LAUNCH = ("python", "-m", "sglang_router.launch_router", "--prometheus-host", "127.0.0.1")

TARGETS = {
    "evenstep": Target("evenstep, bfio", _evenstep),
    "evenstep-rr": Target("evenstep, round_robin", _with("--policy", "round_robin")),
    "evenstep-asgi": Target("evenstep, bfio, --data-plane asgi", _with("--data-plane", "asgi")),
    "vllm-router": Target(
        f"{_VLLM.package}, round_robin", _rust(_VLLM, "vllm-router", "--log-level", "warning")
    ),
    "sglang-router": Target(
        f"{_SGLANG.package}, round_robin", _rust(_SGLANG, *_LAUNCH, "--log-level", "warn")
    ),
}


def pinned(core: str) -> list[str]:
    """Before a command: on which core it runs, if there are two."""
    return ["taskset", "-c", core] if (os.cpu_count() or 1) > 1 else []


def processes(root: int) -> list[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for pid in _pids():
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            continue
        parent = int(stat.rpartition(")")[2].split()[1])
        children.setdefault(parent, []).append(pid)
    found, left = [], [root]
    while left:
        found.append(left.pop())
        left += children.get(found[-1], [])
    return found


def cpu_s(pids: Iterable[int]) -> float:
    """CPU seconds of all their threads so far, to the nanosecond."""
    used_ns = 0
    for pid in pids:
        for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            try:
                used_ns += int(file.read_text().split()[0])
            except OSError:  # the thread has just ended
                continue
    return used_ns / 1e9


def memory_mb(pids: Sequence[int]) -> float:
    """What they hold, each page that several share divided among these (PSS)."""
    sizes = [
        re.search(r"^Pss: +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
        for pid in pids
    ]
    return sum(int(size[1]) for size in sizes if size) / 1024


def _pids() -> Iterator[int]:
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            yield int(path.name)
