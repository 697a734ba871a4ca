"""What snapshots tell the dispatch loop: free slots, ranks in step, and silence."""

import asyncio
from collections.abc import Callable

import pytest

from router.core.events import Progressed
from router.core.request_watcher import Served
from router.core.state.group import Group
from router.core.types import Outcome, Request
from tests.support.core import part, running, token
from tests.support.dispatching import Rig, sent_to, settle
from tests.support.scripted import soon


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

    assert asyncio.get_running_loop().time() - began_s < 5
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

    rig.dispatcher.apply(Progressed(asking.id, 32))

    assert rig.cluster.worker("a").load_tokens == 132


class Late:
    """Snapshots that have arrived, and have not been read."""

    def __init__(self, rig: Rig) -> None:
        self.unread: list[Callable[[], None]] = []
        self.hastened = 0
        rig.dispatcher.read_before_rounds(self)

    def read(self) -> None:
        unread, self.unread = self.unread, []
        for each in unread:
            each()

    def hasten(self) -> None:
        self.hastened += 1


async def test_a_round_goes_by_what_has_come_by_then() -> None:
    rig = Rig({"a": 1, "b": 1})
    rig.report("a", 1)
    rig.report("b", 1, running(part(91)))
    late = Late(rig)
    late.unread = [lambda: rig.report("a", 2, running(part(92))), lambda: rig.report("b", 2)]

    _, waiter = rig.submit(0)
    await settle()

    assert sent_to(waiter) == "b"
    assert (rig.stats.rounds, late.hastened) == (1, 0)


async def test_who_has_to_wait_has_snapshots_read_soon() -> None:
    rig = Rig({"a": 1})
    rig.report("a", 1, running(part(90)))
    late = Late(rig)
    _, waiter = rig.submit(0)
    await settle()

    assert not waiter.done()
    assert late.hastened == 1
    assert rig.dispatcher.waiting


class Ends:
    """Tokens of the requests that end."""

    def __init__(self, rig: Rig) -> None:
        self.tokens: list[tuple[int, int]] = []
        rig.cluster.watchers.append(self)

    def dispatched(self, request: Request) -> None: ...

    def first_byte(self, request: Request, time_s: float) -> None: ...

    def joined(self, group: Group) -> None: ...

    def ended(self, request: Request, served: Served | None, outcome: Outcome) -> None:
        assert served is not None
        self.tokens.append((served.prompt_tokens, served.output_tokens))


async def test_the_last_tokens_of_a_request_count_though_they_are_read_late() -> None:
    rig = Rig({"a": 1})
    rig.report("a", 1)
    late, ends = Late(rig), Ends(rig)
    asking, _ = rig.submit(0)
    await settle()
    engine_id = f"cmpl-{asking.id}-0-1a2b3c4d"
    late.unread = [
        lambda: rig.report("a", 2, running(engine_id, generated_tokens=7)),
        lambda: rig.report("a", 3, finished=(engine_id,)),
    ]

    rig.dispatcher.end(asking, Outcome.COMPLETED)

    assert ends.tokens == [(100, 8)]
