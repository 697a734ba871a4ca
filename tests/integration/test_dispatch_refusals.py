"""Requests that the dispatch loop refuses, and those that it no longer lets wait."""

import asyncio

import pytest
from msgspec import structs

from router.core.errors import NoWorkerError, PoolFullError, QueueTimeoutError
from router.core.events import SnapshotReceived, WorkerDown, WorkerUp
from router.core.types import Outcome
from tests.support.core import snapshot
from tests.support.dispatching import Rig, sent_to, settle
from tests.support.scripted import soon


async def test_a_pool_is_full_only_when_no_slot_is_free() -> None:
    rig = Rig({"a": 2, "b": 2}, pool_size=2)
    waiters = [rig.submit(i)[1] for i in range(6)]  # all within one pass of the event loop

    with pytest.raises(PoolFullError, match="2 requests") as caught:
        rig.submit(6)
    await settle()

    assert [sent_to(waiter) for waiter in waiters] == ["a", "a", "b", "b", None, None]
    assert (rig.stats.rejected, rig.stats.assigned, caught.value.retry_after_s) == (1, 4, 1)
    assert not rig.stats.outcomes


async def test_without_workers_nobody_may_wait() -> None:
    rig = Rig({"a": 1})
    rig.dispatcher.apply(WorkerDown("a", "connection refused"))
    rig.now_s += 1

    with pytest.raises(NoWorkerError, match="a: connection refused"):
        rig.submit(0)
    assert (rig.stats.unserved, rig.waiting) == (1, 0)


async def test_those_who_wait_fail_when_the_last_worker_goes_down() -> None:
    rig = Rig({"a": 1, "b": 1})
    waiters = [rig.submit(i)[1] for i in range(4)]
    await settle()

    rig.dispatcher.apply(WorkerDown("a", "gone"))
    await settle()
    assert not waiters[2].done()
    rig.dispatcher.apply(WorkerDown("b", "gone too"))
    rig.dispatcher.tick()
    assert not waiters[2].done()
    rig.now_s += 1
    rig.dispatcher.tick()

    for waiter in waiters[2:]:
        with pytest.raises(NoWorkerError, match="a: gone, b: gone too"):
            await soon(waiter)
    assert (rig.waiting, rig.stats.outcomes[Outcome.FAILED]) == (0, 2)
    assert rig.group.line.waiting == 0


async def test_ranks_that_tell_of_a_lockstep_go_down_and_come_up_as_by_a_check() -> None:
    def tell(ranks: int, epoch: str) -> None:
        told = structs.replace(snapshot("full", 1, epoch=epoch), ranks=ranks)
        rig.dispatcher.apply(SnapshotReceived("a", told, rig.now_s))

    rig = Rig({"a": 1, "b": 1})
    rig.dispatcher.apply(WorkerDown("b", "gone"))
    tell(2, "together")
    _, waiter = rig.submit(0)
    rig.dispatcher.tick()
    rig.now_s += 1
    rig.dispatcher.tick()
    with pytest.raises(NoWorkerError, match="a: in lockstep with b: gone"):
        await soon(waiter)

    tell(1, "alone")
    rig.dispatcher.tick()
    _, waiter = rig.submit(1)
    await settle()
    assert sent_to(waiter) == "a"


async def test_a_request_that_comes_back_to_no_worker_fails() -> None:
    rig = Rig({"a": 1})
    first, _ = rig.submit(0)
    await settle()
    rig.dispatcher.apply(WorkerDown("a", "gone"))

    first, waiter = rig.dispatcher.give_back(first)
    rig.now_s += 1
    rig.dispatcher.tick()

    with pytest.raises(NoWorkerError):
        await soon(waiter)
    rig.dispatcher.end(first, Outcome.FAILED)

    assert (rig.in_flight, rig.waiting, dict(rig.stats.outcomes)) == (0, 0, {Outcome.FAILED: 1})


async def test_a_group_without_workers_for_a_moment_keeps_its_requests() -> None:
    rig = Rig({"a": 1})
    rig.dispatcher.apply(WorkerDown("a", "one broken answer"))
    _, waiter = rig.submit(0)
    rig.now_s += 0.9
    rig.dispatcher.tick()
    assert not waiter.done()

    rig.dispatcher.apply(WorkerUp("a"))
    rig.now_s += 1
    rig.dispatcher.tick()

    assert (await soon(waiter)).id == "a"


async def test_the_queue_timeout() -> None:
    rig = Rig({"a": 1}, queue_timeout_s=10)
    rig.submit(0)
    await settle()
    asking, old = rig.submit(1)
    rig.now_s += 9
    _, new = rig.submit(2)
    rig.dispatcher.tick()
    assert not old.done()

    rig.now_s += 1
    rig.dispatcher.tick()

    with pytest.raises(QueueTimeoutError, match="within 10 s"):
        await soon(old)
    rig.dispatcher.end(asking, Outcome.FAILED)
    assert not new.done()
    assert (rig.waiting, dict(rig.stats.outcomes)) == (1, {Outcome.EXPIRED: 1})


async def test_one_that_came_back_has_the_queue_timeout_again() -> None:
    rig = Rig({"a": 1, "b": 1}, queue_timeout_s=10)
    first, _ = rig.submit(0)
    rig.submit(1)
    await settle()
    rig.now_s += 30
    rig.dispatcher.apply(WorkerDown("a", "gone"))
    _, again = rig.dispatcher.give_back(first)
    rig.now_s += 9.5
    rig.dispatcher.tick()
    assert not again.done()

    rig.now_s += 1
    rig.dispatcher.tick()

    with pytest.raises(QueueTimeoutError):
        await soon(again)
    assert (rig.waiting, dict(rig.stats.outcomes)) == (0, {Outcome.EXPIRED: 1})
    assert rig.stats.pool_wait_s.total == 0


async def test_the_clock_is_watched() -> None:
    rig = Rig({"a": 1}, queue_timeout_s=10)
    rig.submit(0)
    await settle()
    _, waiter = rig.submit(1)
    rig.now_s += 10
    watching = asyncio.create_task(rig.dispatcher.run())

    with pytest.raises(QueueTimeoutError):
        await soon(waiter)
    watching.cancel()
