"""Whom the dispatch loop gives a slot, and when: a clock of its own and events made by hand."""

import logging
from collections.abc import Sequence

import pytest

from router.core.events import WorkerDown, WorkerUp
from router.core.policies.policy_protocol import NOTHING, Known, Policy
from router.core.types import Assignment, Dispatch, Outcome, Request, WorkerView
from tests.support.dispatching import Rig, sent_to, settle

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


async def test_urgent_requests_without_end_leave_others_one_entry_in_eleven() -> None:
    rig = Rig({"a": 1}, starvation_s=5.0)
    running_now, _ = rig.submit(0)
    await settle()
    others = [rig.submit(number, priority=1) for number in (1, 2)]
    urgent = [rig.submit(3)]
    turns = []
    for second in range(1, 40):
        rig.now_s += 1
        urgent.append(rig.submit(3 + second))
        rig.dispatcher.end(running_now, Outcome.COMPLETED)
        await settle()
        line = others if others and others[0][1].done() else urgent
        running_now, waiter = line.pop(0)
        assert waiter.done()
        if line is others:
            turns.append(second)

    assert len(turns) == 2
    assert turns[0] <= 2 * 11
    assert turns[1] - turns[0] == 11


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
    rig = Rig({"a": 1, "b": 1}, pool_size=1)
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


class Newest(Policy):
    """Always takes the newest."""

    def assign(
        self,
        waiting: Sequence[Request],
        workers: Sequence[WorkerView],
        known: Known = NOTHING,
    ) -> Sequence[Assignment]:
        free = [worker.id for worker in workers for _ in range(worker.capacity)]
        return [Assignment(r.id, i) for r, i in zip(reversed(waiting), free, strict=False)]


async def test_a_request_that_has_lost_patience_goes_first() -> None:
    rig = Rig({"a": 1}, Newest(), starvation_s=5)
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


# clients that leave


async def test_withdrawn_while_waiting() -> None:
    rig = Rig({"a": 1})
    rig.submit(0)
    await settle()
    asking, waiter = rig.submit(1)

    rig.dispatcher.end(asking, Outcome.ABORTED)

    assert waiter.cancelled()
    assert (rig.waiting, rig.in_flight) == (0, 1)
    assert dict(rig.stats.outcomes) == {Outcome.ABORTED: 1}


async def test_withdrawn_after_its_assignment() -> None:
    rig = Rig({"a": 1})
    asking, _ = rig.submit(0)
    _, other = rig.submit(1)
    await settle()

    rig.dispatcher.end(asking, Outcome.ABORTED)
    await settle()

    assert sent_to(other) == "a"
    assert dict(rig.stats.outcomes) == {Outcome.ABORTED: 1}


async def test_the_end_counts_once() -> None:
    rig = Rig({"a": 1})
    asking, _ = rig.submit(0)
    await settle()

    for outcome in (Outcome.COMPLETED, Outcome.FAILED):
        rig.dispatcher.end(asking, outcome)
    rig.dispatcher.end(asking, Outcome.ABORTED)

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
    rig.dispatcher.end(asking, Outcome.ABORTED)
    await settle()

    assert sent_to(other) == "b"
    assert (rig.in_flight, rig.waiting) == (1, 0)
    assert rig.stats.outcomes[Outcome.ABORTED] == 1
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


# policies that cannot be trusted


class Raises(Policy):
    def assign(
        self,
        waiting: Sequence[Request],
        workers: Sequence[WorkerView],
        known: Known = NOTHING,
    ) -> Sequence[Assignment]:
        raise ZeroDivisionError


class HoldsBack(Policy):
    def assign(
        self,
        waiting: Sequence[Request],
        workers: Sequence[WorkerView],
        known: Known = NOTHING,
    ) -> Sequence[Assignment]:
        return []


class Crowds(Policy):
    def assign(
        self,
        waiting: Sequence[Request],
        workers: Sequence[WorkerView],
        known: Known = NOTHING,
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
    (logged,) = caplog.records
    assert "assigned by the fallback" in logged.message
    assert ("broke its contract" in logged.message) == ("PolicyError" in (logged.exc_text or ""))
    assert "Traceback" in (logged.exc_text or "")


# accounts


async def test_waits_and_first_bytes_are_measured_from_the_arrival() -> None:
    rig = Rig({"a": 1})
    first, _ = rig.submit(0)
    await settle()
    second, _ = rig.submit(1)
    rig.now_s += 4
    rig.dispatcher.end(first, Outcome.COMPLETED)
    await settle()
    rig.dispatcher.began(second, "a", rig.now_s + 3)

    assert rig.stats.pool_wait_s.total == pytest.approx(4)
    assert rig.stats.ttft_s.total == pytest.approx(7)
    assert sum(rig.stats.decision_s.counts) == rig.stats.rounds == 2
