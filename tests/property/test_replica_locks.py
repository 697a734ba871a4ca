"""Replicas with a lock, in any weather: never two that decide, and one in the end.

The Lease, or the file, may be deleted at any time.
"""

import asyncio
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.tenure import Tenure
from router.kubernetes import Kubernetes
from router.replicas.file_lock import FileLock
from router.replicas.leading import Leading
from router.replicas.lease import LeaseLock
from tests.support.kube_api import KubeApi
from tests.support.virtual_time import run_virtually

LEASE_S, STORM_S, CALM_S = 5, 60.0, 20.0

# Who it happens to, from when, how long; "asked" loses requests, "answered" the answers to them;
# "late" are answers that come just in time.
Trouble = tuple[int, float, float, str]
TROUBLES = st.tuples(
    st.integers(0, 2),
    st.floats(0, STORM_S),
    st.floats(0.1, 15),
    st.sampled_from(["asked", "answered", "slow", "late"]),
)
CLOCKS = st.tuples(st.floats(-1e6, 1e6), st.floats(0.95, 1.04))


class Way(httpx.AsyncBaseTransport):
    """Of one replica to the API; it has troubles."""

    def __init__(self, api: KubeApi, troubles: list[Trouble], rng: Random) -> None:
        self._api = httpx.ASGITransport(api.app)
        self._troubles = troubles
        self._rng = rng

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        # What the replica gives up may still arrive there.
        answer = await asyncio.shield(asyncio.ensure_future(self._arrive(request)))
        await self._pass("answered")
        return answer

    async def _arrive(self, request: httpx.Request) -> httpx.Response:
        await self._pass("asked")
        return await self._api.handle_async_request(request)

    async def _pass(self, what: str) -> None:
        now_s = asyncio.get_running_loop().time()
        kinds = {kind for _, since_s, s, kind in self._troubles if since_s <= now_s < since_s + s}
        if what in kinds:
            await asyncio.sleep(3600)
        most_s = 4.0 if "slow" in kinds else 0.05
        late = "late" in kinds and what == "answered"
        await asyncio.sleep(1.4 if late else self._rng.uniform(0, most_s))


@dataclass
class Fleet:
    """All workers have told, at once."""

    all_shown: bool = True
    leads: list[str] = field(default_factory=list)

    def told_since(self, since_s: float) -> bool:
        return True

    def lead(self) -> None:
        self.leads.append("")


def replica(
    name: str, api: KubeApi, clock: tuple[float, float], troubles: list[Trouble], rng: Random
) -> Leading:
    offset_s, speed = clock
    loop = asyncio.get_running_loop()

    def own_clock() -> float:
        return offset_s + speed * loop.time()

    way = Kubernetes("http://api", Way(api, troubles, rng))
    leading = Leading(LeaseLock(way, "default", "evenstep", LEASE_S, own_clock), name, own_clock)
    leading.know(Fleet(), lambda: None)
    return leading


@settings(max_examples=60)
@given(
    st.lists(CLOCKS, min_size=3, max_size=3),
    st.lists(TROUBLES, max_size=12),
    st.lists(st.tuples(st.integers(0, 2), st.floats(0, STORM_S)), max_size=2),
    st.lists(st.floats(0, STORM_S), max_size=4),
    st.integers(0, 1 << 32),
)
def test_never_two_decide_and_one_does_in_the_end(
    clocks: list[tuple[float, float]],
    troubles: list[Trouble],
    ends: list[tuple[int, float]],
    deletions: list[float],
    seed: int,
) -> None:
    async def run() -> None:
        api, rng, loop = KubeApi(), Random(seed), asyncio.get_running_loop()
        replicas = [
            replica(str(i), api, clock, [each for each in troubles if each[0] == i], rng)
            for i, clock in enumerate(clocks)
        ]
        running = [asyncio.create_task(each.run()) for each in replicas]
        for number, at_s in ends:
            loop.call_at(at_s, replicas[number].release)
        for at_s in deletions:
            loop.call_at(at_s, api.objects.clear)
        led = 0
        while loop.time() < STORM_S + CALM_S:
            await asyncio.sleep(0.05)
            serve = [each.name for each in replicas if each.serves]
            assert len(serve) <= 1, f"{loop.time():.2f} s: {serve}"
            led += sum(each.decides for each in replicas)
        left = {str(i) for i in range(3)} - {str(number) for number, _ in ends}
        decides = [each.name for each in replicas if each.decides]
        assert len(decides) == 1
        assert decides[0] in left
        assert led
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    run_virtually(run())


@settings(max_examples=30)
@given(st.floats(10, 12), st.integers(0, 1 << 32))
def test_after_a_kill_another_decides_soon(killed_s: float, seed: int) -> None:
    async def run() -> None:
        api, rng, loop = KubeApi(), Random(seed), asyncio.get_running_loop()
        gone: list[Trouble] = []
        replicas = [replica("0", api, (0.0, 1.0), gone, rng)]
        running = [asyncio.create_task(replicas[0].run())]
        await asyncio.sleep(7)
        assert replicas[0].decides
        for name in "12":
            replicas.append(replica(name, api, (0.0, 1.0), [], rng))
            running.append(asyncio.create_task(replicas[-1].run()))
        await asyncio.sleep(killed_s - 7)
        gone.extend((0, 0.0, 1e9, kind) for kind in ("asked", "answered"))
        while not any(each.decides for each in replicas[1:]):  # noqa: ASYNC110 - time is virtual
            await asyncio.sleep(0.01)
        # The lease, then one look at it before, the way of three requests, and of what is sent.
        assert loop.time() - killed_s < LEASE_S + 0.5 + 3 * 0.1 + 0.15
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    run_virtually(run())


Step = tuple[int, float, str]
STEPS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.floats(0, 12),
        st.sampled_from(["attempts", "attempts", "attempts", "stalls", "deleted", "dies"]),
    ),
    max_size=60,
)


@settings(max_examples=200)
@given(STEPS)
def test_of_a_file_that_is_deleted_there_are_never_two_holders(steps: list[Step]) -> None:
    now_s = 0.0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lock"
        locks = [FileLock(path, 10.0, lambda: now_s) for _ in range(3)]
        tenures = [Tenure(10.0) for _ in range(3)]
        for who, after_s, what in steps:
            asked_s = now_s
            now_s += after_s
            if what == "deleted":
                path.unlink(missing_ok=True)
            elif what == "dies":
                locks[who]._close()
                tenures[who].end()
            elif locks[who]._attempt(str(who)) == str(who):
                # A replica that stalls hears of its success late.
                tenures[who].renew(asked_s if what == "stalls" else now_s, now_s)
            else:
                tenures[who].end()
            assert sum(tenure.holds(now_s) for tenure in tenures) <= 1
        for lock in locks:
            lock._close()
