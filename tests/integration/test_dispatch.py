"""The dispatch loop with a clock of its own and events made by hand."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest

from router.errors import NoWorkerError, PoolFullError, QueueTimeoutError
from router.forecast import Outlook
from router.types import (
    Assignment,
    Dispatch,
    Outcome,
    Request,
    WorkerDown,
    WorkerSpec,
    WorkerUp,
    WorkerView,
)
from tests.support.core import part, running, token
from tests.support.dispatching import Rig, settle
from tests.support.scripted import soon


def sent_to(waiter: asyncio.Future[WorkerSpec]) -> str | None:
    return waiter.result().id if waiter.done() else None


# slots


async def test_a_free_slot_is_given_at_once() -> None:
    rig = Rig({"a": 1, "b": 1})
    waiters = [rig.submit(i)[1] for i in range(3)]
    await settle()

    assert [sent_to(waiter) for waiter in waiters] == ["a", "b", None]
    assert (rig.waiting, rig.in_flight) == (1, 2)


async def test_a_slot_that_becomes_free_is_given_at_once() -> None:
    rig = Rig({"a": 1})
    first, _ = rig.submit(0)
    _, second = rig.submit(1)
    await settle()
    assert sent_to(second) is None

    rig.dispatcher.end(first, Outcome.COMPLETED)
    await settle()

    assert sent_to(second) == "a"


async def test_a_request_of_several_parts_takes_as_many_slots() -> None:
    rig = Rig({"a": 4})
    wide, _ = rig.submit(0, slots=3)
    _, small = rig.submit(1)
    _, waiting = rig.submit(2)
    await settle()
    assert (sent_to(small), sent_to(waiting)) == ("a", None)

    rig.dispatcher.end(wide, Outcome.COMPLETED)
    await settle()

    assert rig.cluster.worker("a").free_slots == 2


async def test_a_worker_that_comes_up_takes_those_who_wait() -> None:
    rig = Rig({"a": 1, "b": 1})
    rig.dispatcher.apply(WorkerDown("b", "gone"))
    waiters = [rig.submit(i)[1] for i in range(2)]
    await settle()
    assert sent_to(waiters[1]) is None

    rig.dispatcher.apply(WorkerUp("b"))
    await settle()

    assert sent_to(waiters[1]) == "b"


async def test_instant_dispatch_waits_for_no_slot() -> None:
    rig = Rig({"a": 1}, dispatch=Dispatch.INSTANT)
    waiters = [rig.submit(i)[1] for i in range(5)]
    await settle()

    assert [sent_to(waiter) for waiter in waiters] == ["a"] * 5
    assert rig.cluster.worker("a").free_slots == 0


# order


async def test_lower_priority_numbers_go_first_then_earlier_arrivals() -> None:
    rig = Rig({"a": 1})
    running_now, _ = rig.submit(0)
    await settle()
    waiters = {}
    for number, priority in [(1, 0), (2, 0), (3, -1), (4, 1)]:
        rig.now_s += 1
        waiters[number] = rig.submit(number, priority=priority)
    order = []
    while waiters:
        rig.dispatcher.end(running_now, Outcome.COMPLETED)
        await settle()
        (number,) = (i for i, (_, waiter) in waiters.items() if waiter.done())
        running_now, _ = waiters.pop(number)
        order.append(number)

    assert order == [3, 1, 2, 4]


async def test_a_request_that_comes_back_keeps_its_place() -> None:
    rig = Rig({"a": 1})
    first, _ = rig.submit(0)
    await settle()
    rig.now_s += 1
    _, second = rig.submit(1)

    _, again = rig.dispatcher.give_back(first)
    await settle()

    assert (sent_to(again), sent_to(second)) == ("a", None)
    assert (rig.stats.returned, rig.stats.assigned, rig.in_flight) == (1, 2, 1)


async def test_a_request_that_comes_back_finds_room_in_a_full_pool() -> None:
    rig = Rig({"a": 1, "b": 1}, pool_limit=1)
    first, _ = rig.submit(0)
    await settle()
    rig.submit(1)
    await settle()
    _, third = rig.submit(2)
    rig.dispatcher.apply(WorkerDown("a", "gone"))

    _, again = rig.dispatcher.give_back(first)
    await settle()

    assert rig.waiting == 2
    assert not again.done()
    assert not third.done()


class Newest:
    """Always takes the newest."""

    def assign(
        self,
        waiting: Sequence[Request],
        workers: Sequence[WorkerView],
        outlook: Outlook | None = None,
    ) -> Sequence[Assignment]:
        free = [worker.id for worker in workers for _ in range(worker.capacity)]
        return [Assignment(r.id, i) for r, i in zip(reversed(waiting), free, strict=False)]


async def test_a_request_that_has_lost_patience_goes_first() -> None:
    rig = Rig({"a": 1}, Newest(), patience_s=5)
    first, _ = rig.submit(0)
    await settle()
    second, old = rig.submit(1)
    rig.now_s += 5
    _, new = rig.submit(2)

    rig.dispatcher.end(first, Outcome.COMPLETED)
    await settle()
    assert (sent_to(old), sent_to(new)) == ("a", None)
    rig.dispatcher.end(second, Outcome.COMPLETED)
    await settle()
    assert sent_to(new) == "a"


# refusals


async def test_a_pool_is_full_only_when_no_slot_is_free() -> None:
    rig = Rig({"a": 2, "b": 2}, pool_limit=2)
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
    assert rig.group.waiting == 0


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


# clients that leave


async def test_withdrawn_while_waiting() -> None:
    rig = Rig({"a": 1})
    rig.submit(0)
    await settle()
    asking, waiter = rig.submit(1)

    rig.dispatcher.withdraw(asking)

    assert waiter.cancelled()
    assert (rig.waiting, rig.in_flight) == (0, 1)
    assert dict(rig.stats.outcomes) == {Outcome.ABORTED: 1}


async def test_withdrawn_after_its_assignment() -> None:
    rig = Rig({"a": 1})
    asking, _ = rig.submit(0)
    _, other = rig.submit(1)
    await settle()

    rig.dispatcher.withdraw(asking)
    await settle()

    assert sent_to(other) == "a"
    assert dict(rig.stats.outcomes) == {Outcome.ABORTED: 1}


async def test_the_end_counts_once() -> None:
    rig = Rig({"a": 1})
    asking, _ = rig.submit(0)
    await settle()

    for outcome in (Outcome.COMPLETED, Outcome.FAILED):
        rig.dispatcher.end(asking, outcome)
    rig.dispatcher.withdraw(asking)

    assert (rig.in_flight, dict(rig.stats.outcomes)) == (0, {Outcome.COMPLETED: 1})


async def test_a_client_that_leaves_in_the_very_round_of_its_assignment(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig({"a": 1, "b": 1})
    holding = [rig.submit(i)[0] for i in range(2)]
    await settle()
    asking, waiter = rig.submit(2)
    _, other = rig.submit(3)
    await settle()
    for request in holding:
        rig.dispatcher.end(request, Outcome.COMPLETED)

    waiter.cancel()  # what cancelling a task that awaits it does
    await settle()
    rig.dispatcher.withdraw(asking)
    await settle()

    assert sent_to(other) == "b"
    assert (rig.in_flight, rig.waiting) == (1, 0)
    assert rig.stats.outcomes[Outcome.ABORTED] == 1
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


# snapshots


async def test_ranks_of_one_step_are_awaited() -> None:
    rig = Rig({"a": 1, "b": 1})
    rig.report("a", 1, running(part(90)))
    rig.report("b", 1, running(part(91)))
    waiters = [rig.submit(i)[1] for i in range(2)]
    await settle()

    rig.report("a", 2)
    await settle()
    assert not any(waiter.done() for waiter in waiters)
    rig.report("b", 2)
    await settle()

    assert [sent_to(waiter) for waiter in waiters] == ["a", "b"]
    assert rig.stats.rounds == 1


async def test_ranks_that_do_not_report_are_not_awaited_for_long() -> None:
    rig = Rig({"a": 1, "b": 1})
    rig.report("a", 1, running(part(90)))
    rig.report("b", 1, running(part(91)))
    _, waiter = rig.submit(0)
    await settle()

    rig.report("a", 2)
    began_s = asyncio.get_running_loop().time()
    await soon(waiter)

    assert asyncio.get_running_loop().time() - began_s < 1
    assert sent_to(waiter) == "a"


async def test_a_newcomer_does_not_wait_for_the_ranks() -> None:
    rig = Rig({"a": 2, "b": 1})
    rig.report("a", 1, running(part(90)), running(part(92)))
    rig.report("b", 1, running(part(91)))
    _, first = rig.submit(0)
    await settle()

    rig.report("a", 2)
    _, second = rig.submit(1)
    await settle()

    assert (sent_to(first), sent_to(second)) == ("a", "a")


async def test_a_dispatch_counts_before_a_snapshot_shows_it() -> None:
    rig = Rig({"a": 1})
    rig.report("a", 1)
    _, first = rig.submit(0)
    _, second = rig.submit(1)
    await settle()
    assert (sent_to(first), sent_to(second)) == ("a", None)

    rig.report("a", 2)  # taken before the request came
    await settle()
    assert not second.done()
    rig.report("a", 3, running(f"cmpl-{token(0)}-0-1a2b3c4d"))
    rig.report("a", 4, finished=(f"cmpl-{token(0)}-0-1a2b3c4d",))
    await soon(second)


async def test_snapshots_that_stop_no_longer_count(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig({"a": 0}, snapshot_stale_s=3)
    rig.report("a", 1, running("other-1"), running("other-2"), slots=2)
    _, waiter = rig.submit(0)
    rig.now_s += 3
    rig.dispatcher.tick()
    await settle()
    assert not waiter.done()

    rig.now_s += 0.1
    rig.dispatcher.tick()
    await settle()

    assert sent_to(waiter) == "a"
    assert rig.cluster.worker("a").feed is None
    assert "no snapshot for 3.1 s" in caplog.text
    rig.report("a", 1, slots=2)
    assert rig.cluster.worker("a").feed is not None


async def test_progress_counts_where_no_snapshot_does() -> None:
    rig = Rig({"a": 1})
    asking, _ = rig.submit(0, prompt_tokens=100)
    await settle()

    rig.dispatcher.progress(asking, 32)

    assert rig.cluster.worker("a").load_tokens == 132


# policies that cannot be trusted


class Raises:
    def assign(
        self,
        waiting: Sequence[Request],
        workers: Sequence[WorkerView],
        outlook: Outlook | None = None,
    ) -> Sequence[Assignment]:
        raise ZeroDivisionError


class HoldsBack:
    def assign(
        self,
        waiting: Sequence[Request],
        workers: Sequence[WorkerView],
        outlook: Outlook | None = None,
    ) -> Sequence[Assignment]:
        return []


class Crowds:
    def assign(
        self,
        waiting: Sequence[Request],
        workers: Sequence[WorkerView],
        outlook: Outlook | None = None,
    ) -> Sequence[Assignment]:
        return [Assignment(request.id, workers[0].id) for request in waiting]


@pytest.mark.parametrize("policy", [Raises(), HoldsBack(), Crowds()])
async def test_a_broken_policy_is_replaced_for_the_round(
    policy: Raises | HoldsBack | Crowds, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig({"a": 1, "b": 1}, policy)
    waiters = [rig.submit(i)[1] for i in range(3)]
    await settle()

    assert [sent_to(waiter) for waiter in waiters] == ["a", "b", None]
    assert (rig.stats.rounds, rig.stats.policy_errors) == (1, 1)
    assert "assigned by the fallback" in caplog.text


# accounts


async def test_waits_and_first_bytes_are_measured_from_the_arrival() -> None:
    rig = Rig({"a": 1})
    first, _ = rig.submit(0)
    await settle()
    second, _ = rig.submit(1)
    rig.now_s += 4
    rig.dispatcher.end(first, Outcome.COMPLETED)
    await settle()
    rig.dispatcher.first_byte(second, rig.now_s + 3)

    assert rig.stats.pool_wait_s.total == pytest.approx(4)
    assert rig.stats.ttft_s.total == pytest.approx(7)
    assert sum(rig.stats.decision_s.counts) == rig.stats.rounds == 2
