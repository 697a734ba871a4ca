"""A chaos run: an emulated fleet, a real router process, clients, faults; and its account."""

import asyncio
import contextlib
import itertools
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.support.chaos import SLOTS, assert_idle, cluster, live
from tests.support.chaos_clients import Caller, closing
from tests.support.chaos_judging import Heard, attempts_of, by_client, hear, hold, overlap_s
from tests.support.chaos_schedule import FAULTS, Ask, Strike, asks, strikes
from tests.support.fleet import Fleet
from tests.support.sent import read_sent
from tests.support.server import Server, wait_until

RANKS = 5
CLIENTS = 48
WARM_UP = 200
GROWTH_MB = 40
"""Room for what a router learns and keeps; a leak for each request would be far more."""
TOGETHER_S = 0.5
"""An end and what comes after it may be read by the fleet in one turn, in either order."""
# Faults are short here, and so is the router's patience with them.
PATIENCE = (
    *("--health-interval", "0.3", "--health-timeout", "0.5"),
    *("--first-byte-timeout", "2", "--stream-idle-timeout", "1"),
    *("--breaker-open", "0.5", "--slow-start", "1"),
)


@dataclass(slots=True)
class Load:
    """The clients of a run.

    Attributes:
        sent: requests so far.
        heard: what came of those that have ended.
        refused: requests that the router, while it ended, did not accept.
        ending: the router has been told to end, so that it may refuse to listen.
    """

    router: Server
    sent: int = 0
    heard: list[Heard] = field(default_factory=list)
    refused: list[Ask] = field(default_factory=list)
    ending: bool = False
    _moved: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, requests: Iterable[Ask]) -> None:
        """Ask all of these.

        Raises:
            AssertionError: an answer did not end as one must.
        """
        coming = iter(requests)
        callers = [Caller(self.router.port) for _ in range(CLIENTS)]
        with closing(callers):
            async with asyncio.TaskGroup() as group:
                for caller in callers:
                    group.create_task(self._one_after_another(caller, coming))

    async def until(self, sent: int) -> None:
        """Wait until so many requests have been sent."""
        while self.sent < sent:
            self._moved.clear()
            await self._moved.wait()

    async def _one_after_another(self, caller: Caller, coming: Iterator[Ask]) -> None:
        for ask in coming:
            self.sent += 1
            self._moved.set()
            got = await caller.call(ask)
            if got.refused and self.ending:
                self.refused.append(ask)
                return
            self.heard.append(hear(got))


@dataclass(frozen=True, slots=True)
class Account:
    """What a run came to.

    Attributes:
        seed: that everything random in it followed from.
        ends: how the requests ended.
        struck: how often each fault was given to a worker.
        tried: how many requests reached workers once, twice, …
        overlap_s: for how long two workers had one request at most.
        tokens: that clients have received.
    """

    seed: int
    ends: Counter[str]
    struck: Counter[str]
    tried: Counter[int]
    overlap_s: float
    tokens: int
    seconds: float

    def __str__(self) -> str:
        return "\n".join(
            [
                f"seed {self.seed} (--chaos-seed)",
                f"{self.ends.total():,} requests in {self.seconds:.0f} s, {CLIENTS} clients",
                f"ended: {_listed(self.ends)}",
                f"injected: {_listed(self.struck)}",
                f"workers that a request reached: {_listed(self.tried)}",
                f"two workers had one request for {self.overlap_s * 1e3:.0f} ms at most",
                f"{self.tokens:,} tokens received, each held against the fleet's record",
            ]
        )


def _listed(counts: Counter[Any]) -> str:
    return ", ".join(f"{name}: {counts[name]:,}" for name in sorted(counts))


async def run(
    folder: Path, seed: int, count: int, names: Sequence[str], fleet_flags: Sequence[str] = ()
) -> Account:
    """So many requests under these faults, each held against the fleet's record.

    Raises:
        AssertionError: a promise was not kept.
    """
    with chaotic(folder, fleet_flags=fleet_flags) as (fleet, router, record):
        load, requests = Load(router), asks(seed)
        await load.run(itertools.islice(requests, WARM_UP))
        open_files, before_mb = files_open(router), memory_mb(router)
        began_s = time.monotonic()
        coming = strikes(seed, names, len(fleet.workers))
        async with under_faults(fleet, load, coming) as struck:
            await load.run(itertools.islice(requests, count))
        seconds = time.monotonic() - began_s
        await asyncio.to_thread(settle, fleet, load, open_files)
        assert memory_mb(router) - before_mb < GROWTH_MB
        return account(seed, load, record, struck, seconds)


@contextlib.contextmanager
def chaotic(
    folder: Path, *router_flags: str, fleet_flags: Sequence[str] = ()
) -> Iterator[tuple[Fleet, Server, Path]]:
    """Fleet and router, and the fleet's record."""
    record = folder / "answers.jsonl"
    flags = ("--no-barrier", "--answers", str(record), *fleet_flags)
    with cluster(folder, *flags, workers=RANKS, router_flags=(*PATIENCE, *router_flags)) as (
        fleet,
        router,
    ):
        yield fleet, router, record


@contextlib.asynccontextmanager
async def under_faults(
    fleet: Fleet, load: Load, coming: Iterator[Strike]
) -> AsyncIterator[Counter[str]]:
    """Let workers fail by the schedule during the block; yields how often each fault did."""
    struck: Counter[str] = Counter()
    begun_at = load.sent

    async def end(one: Strike) -> None:
        await load.until(begun_at + one.ends_at)
        assert (await control.post(f"/workers/{one.rank}/restore")).is_success

    async def strike_all() -> None:
        async with asyncio.TaskGroup() as ends:
            for one in coming:
                await load.until(begun_at + one.begins_at)
                fault = control.post(f"/workers/{one.rank}/fault", json=FAULTS[one.name])
                assert (await fault).is_success
                struck[one.name] += 1
                ends.create_task(end(one))

    async with httpx.AsyncClient(base_url=fleet.control_url, timeout=60) as control:
        striking = asyncio.create_task(strike_all())
        try:
            yield struck
        finally:
            striking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await striking


def settle(fleet: Fleet, load: Load, open_files: int) -> None:
    """No more faults: every worker comes back, and nothing is left of what went on.

    Raises:
        AssertionError: something is.
    """
    router = load.router
    ranks = range(len(fleet.workers))
    fleet.restore()
    wait_until(lambda: live(router) == list(ranks), 60, "all workers are up again")
    assert_idle(fleet, router)
    counted = requests_counted(router)
    # Who leaves at once may be gone before the router has read what is asked.
    unread = sum(heard.unread for heard in load.heard)
    lines = re.findall(r"request request_id=(\S+) method=POST", router.log.read_text())
    for count in (sum(counted.values()), len(lines), len(set(lines))):
        assert load.sent - unread <= count <= load.sent, (load.sent, counted, len(lines))
    # Idle connections to workers, as many as requests that were there at once, and health checks'.
    most = open_files + len(ranks) * (SLOTS + 2)
    wait_until(lambda: files_open(router) <= most, 30, f"at most {most} files are open")


def account(seed: int, load: Load, record: Path, struck: Counter[str], seconds: float) -> Account:
    """Hold every answer against the record.

    Raises:
        AssertionError: one is not as it was sent, or an engine was asked the same twice.
    """
    attempts = attempts_of(read_sent(record))
    for heard in load.heard:
        hold(heard, attempts)
    by_id = by_client(attempts)
    assert not [ask.id for ask in load.refused if ask.id in by_id], "not accepted, and yet sent on"
    tried = by_id.values()
    return Account(
        seed=seed,
        ends=Counter(heard.end for heard in load.heard),
        struck=struck,
        tried=Counter(len(sent) for sent in tried),
        overlap_s=max(overlap_s(sent) for sent in tried),
        # Each is a word with a space before it.
        tokens=sum(heard.text.count(" ") for heard in load.heard),
        seconds=seconds,
    )


def requests_counted(router: Server) -> dict[str, int]:
    """What the router's metrics say became of its requests; those of prefill workers are parts."""
    text = router.get("/metrics").text
    pattern = r'^evenstep_requests_total\{group="default",outcome="(\w+)".*\} (\S+)$'
    return {name: round(float(n)) for name, n in re.findall(pattern, text, re.MULTILINE)}


def memory_mb(server: Server) -> float:
    """The process's own memory; with files that others read too, it would change with them."""
    text = Path(f"/proc/{server.process.pid}/status").read_text()
    found = re.search(r"^RssAnon:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


def files_open(server: Server) -> int:
    """Connections and whatever else it has open."""
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
