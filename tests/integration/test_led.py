"""Requests where another replica decides, or begins to."""

import asyncio

import pytest

from router.core.errors import NoWorkerError
from router.replicas.leading import Leading
from tests.support.core import running
from tests.support.dispatching import Rig, sent_to, settle


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, workers tell of themselves in time."""
    monkeypatch.setattr("router.replicas.leading._LONGEST_S", 3600.0)


class Held:
    """A lock whose holder a test names."""

    lease_s, period_s = 10.0, 0.001

    def __init__(self) -> None:
        self.holder = "other"
        self.tried = asyncio.Event()
        self.released = asyncio.Event()

    async def attempt(self, name: str) -> str:
        self.tried.set()
        if self.holder == "nobody":
            raise TimeoutError
        return self.holder

    async def look(self) -> str:
        return self.holder

    async def release(self, name: str) -> None:
        self.released.set()

    async def aclose(self) -> None: ...

    async def known(self) -> None:
        """Until what it says now has been heard."""
        for _ in range(2):
            self.tried.clear()
            await asyncio.wait_for(self.tried.wait(), 10)
            await settle()


class Led(Rig):
    def __init__(self, **slots: int) -> None:
        super().__init__(slots)
        self.lock, self.clock_s, self.asked = Held(), 0.0, asyncio.Event()
        self.leading = Leading(self.lock, "self", lambda: self.clock_s)
        self.dispatcher._shared.leading = self.leading
        self.leading.know(self.dispatcher, self.asked.set)
        self.running = asyncio.create_task(self.leading.run())

    async def lead(self) -> None:
        self.lock.holder = "self"
        await asyncio.wait_for(self.asked.wait(), 10)

    async def stop(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        assert self.lock.released.is_set()


async def test_a_follower_says_who_decides() -> None:
    rig = Led(a=1)
    with pytest.raises(NoWorkerError, match="no replica decides now; retry"):
        rig.submit(1)
    await rig.lock.known()
    with pytest.raises(NoWorkerError, match="another replica decides: other; retry"):
        rig.submit(1)
    assert rig.dispatcher.prompt_budget("a") is None
    await rig.stop()


async def test_a_new_leader_waits_until_its_workers_have_told_of_themselves() -> None:
    rig = Led(a=0)
    rig.report("a", 1, slots=1)
    await rig.lead()
    _, waiter = rig.submit(1)
    await settle()
    assert rig.leading.standing == "this replica is taking over"
    assert not waiter.done()
    rig.now_s = 1e9  # of snapshots from here on
    rig.report("a", 2, running("x"), slots=1)
    await rig.lock.known()
    while not rig.leading.decides:  # noqa: ASYNC110 - as it looks itself
        await asyncio.sleep(0.001)
    await settle()
    assert not waiter.done()  # the slot is another one's
    rig.report("a", 3, slots=1)
    await settle()
    assert sent_to(waiter) == "a"
    await rig.stop()


async def test_what_waits_is_refused_once_the_lease_is_over() -> None:
    rig = Led(a=1)
    await rig.lead()
    while not rig.leading.decides:  # noqa: ASYNC110 - as it looks itself
        await asyncio.sleep(0.001)
    _, first = rig.submit(1)
    _, second = rig.submit(2)
    await settle()
    assert (sent_to(first), second.done()) == ("a", False)
    rig.lock.holder = "nobody"
    await rig.lock.known()
    rig.clock_s += 8.0
    with pytest.raises(NoWorkerError, match="no replica decides now"):
        rig.leading.check()
    rig.dispatcher.tick()
    assert isinstance(second.exception(), NoWorkerError)
    assert rig.leading.failures
    await rig.stop()


async def test_a_leader_that_ends_leaves_the_lock_once_workers_show_what_it_sent() -> None:
    rig = Led(a=0)
    rig.report("a", 1, slots=2)
    await rig.lead()
    rig.now_s = 1e9  # of snapshots from here on
    rig.report("a", 2, slots=2)
    while not rig.leading.decides:  # noqa: ASYNC110 - as it looks itself
        await asyncio.sleep(0.001)
    asking, waiter = rig.submit(1)
    await settle()
    assert sent_to(waiter) == "a"
    rig.leading.release()
    assert not rig.leading.decides
    await settle()
    assert not rig.lock.released.is_set()
    rig.report("a", 3, running(asking.id), slots=2)
    await asyncio.wait_for(rig.lock.released.wait(), 10)
    rig.lock.holder = "next@http://127.0.0.1:1"
    while not rig.leading.follows:  # it knows where requests go that still come here
        await asyncio.wait_for(rig.leading.change(10), 10)
    await rig.stop()
