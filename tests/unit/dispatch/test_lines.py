"""Groups that begin and cease to serve a model together, and what waits for it."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

import pytest

from router.core.errors import NoWorkerError, TargetError
from router.core.events import Ended, Progressed, SnapshotReceived, WorkerDown, WorkerUp
from router.core.policies.baselines import PerRequest, fcfs
from router.core.prefix.prefixes import Prefixes
from router.core.state.cluster import Cluster
from router.core.step_time import StepTime
from router.core.targets import Targets
from router.core.types import Outcome, Request, WorkerSpec
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.group_queue import DISSOLVED_S
from router.dispatch.interface import Deciding, Waiter
from router.dispatch.models import ModelTable
from tests.support.core import request, snapshot
from tests.support.dispatching import dispatch_settings, sent_to, settle


class Shared:
    """A router whose groups have one worker each, with a slot and their name."""

    def __init__(self, slots: int = 1, **models: str) -> None:
        self.now_s = 100.0
        self.cluster = Cluster([WorkerSpec(i, "", i, slots=slots) for i in models])
        make = lambda: PerRequest(fcfs)  # noqa: E731
        self.dispatcher = Dispatcher(
            self.cluster, Deciding(make, make), dispatch_settings(), lambda: self.now_s
        )
        self.models = ModelTable(self.cluster)
        self.models.on_shared = self.dispatcher.share
        for worker_id, served in models.items():
            self.dispatcher.apply(WorkerUp(worker_id))
            self.learn(worker_id, served)

    def learn(self, worker_id: str, served: str) -> None:
        self.models.learn(worker_id, {name: {} for name in served.split()})

    def ask(self, number: int, model: str) -> tuple[Request, Waiter]:
        group, lacks = self.models.group(model), self.models.lacking(model)
        asked = replace(request(number, arrival=self.now_s), group=group, lacks=lacks, model=model)
        return asked, self.dispatcher.submit(asked)

    def end(self, *asked: tuple[Request, Waiter]) -> None:
        for one, _ in asked:
            self.dispatcher.end(one, Outcome.COMPLETED)

    def remove(self, worker_id: str) -> None:
        self.dispatcher.leave(worker_id)
        self.models.leave(worker_id)

    @property
    def waiting(self) -> dict[str, int]:
        """Requests by group, at its pool and as the cluster counts them."""
        for queue in self.dispatcher.queues.values():
            assert len(queue.pool) == len(queue.waiters) == queue.group.line.waiting
        deciders = self.dispatcher.deciders.items()
        return {name: decider.waiting for name, decider in deciders if decider.waiting}


def sent(asked: Iterable[tuple[Request, Waiter]]) -> list[str | None]:
    return [sent_to(waiter) for _, waiter in asked]


async def test_a_group_with_another_model_leaves_its_requests_to_the_others() -> None:
    router = Shared(a="llama", b="llama")
    first = [router.ask(number, "llama") for number in range(5)]
    await settle()
    assert sorted(map(str, sent(first))) == ["None"] * 3 + ["a", "b"]

    router.learn("b", "qwen")
    second = [router.ask(number, "qwen") for number in (5, 6)]
    await settle()
    assert router.waiting == {"a": 3, "b": 2}
    router.end(next(one for one in first if sent_to(one[1]) == "b"))
    await settle()
    assert (sent(second), router.waiting) == (["b", None], {"a": 3, "b": 1})
    served = [one for one in first if sent_to(one[1]) == "a"]
    for _ in range(3):
        router.end(served[-1])
        await settle()
        served += [one for one in first if one not in served and sent_to(one[1]) == "a"]
    assert (len(served), router.waiting) == (4, {"b": 1})
    router.end(served[-1], *second)


async def test_a_target_is_judged_by_the_groups_that_take_requests() -> None:
    router = Shared(a="llama", b="llama")
    router.cluster.groups["b"].fix_step_time(StepTime(9.5))
    wanted = replace(request(0), targets=Targets(ttft_s=0.1), group="a", model="llama")
    learning = router.dispatcher.submit(wanted)
    await settle()
    assert sent_to(learning) is not None, "of a nothing is known yet"
    router.dispatcher.end(wanted, Outcome.COMPLETED)
    router.dispatcher.drain("a", draining=True)
    with pytest.raises(TargetError, match=r"the prompt alone takes about 9.5 s"):
        router.dispatcher.submit(replace(wanted, arrival_s=router.now_s))


async def test_a_request_that_one_group_left_to_another_is_sent_at_the_next_tick() -> None:
    router = Shared(a="llama", b="llama")
    busy = [router.ask(number, "llama") for number in range(2)]
    await settle()
    waits, waiter = router.ask(2, "llama")
    await settle()
    freed, at = busy[0]
    router.cluster.apply(Ended(freed.id, Outcome.COMPLETED, router.now_s))  # nobody is told
    await settle()
    assert sent_to(waiter) is None
    router.dispatcher.tick()
    await settle()
    assert sent_to(waiter) == sent_to(at)
    router.end(busy[1], (waits, waiter))


async def test_what_waits_is_shown_where_it_may_be_served() -> None:
    router = Shared(a="llama", b="llama")
    asked = [router.ask(number, "llama") for number in range(3)]
    await settle()
    assert router.waiting == {"a": 1}
    router.dispatcher.apply(WorkerDown("a", "gone"))
    assert router.waiting == {"b": 1}
    router.dispatcher.apply(WorkerDown("b", "gone"))
    assert router.waiting == {"a": 1}
    router.end(*asked)


async def test_caches_that_are_no_longer_asked_forget_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router, forgotten = Shared(a="llama", b="llama sql"), list[tuple[object, str]]()
    busy = [router.ask(number, "llama") for number in range(2)]
    await settle()
    (shared, _), (own, _) = waiting = [router.ask(2, "llama"), router.ask(3, "sql")]
    forget = lambda self, id_: forgotten.append((self, id_))  # noqa: E731
    monkeypatch.setattr(Prefixes, "forget", forget)
    router.learn("b", "sql")
    caches = {name: group.prefixes for name, group in router.cluster.groups.items()}
    assert forgotten == [(caches["b"], shared.id), (caches["a"], own.id)]
    router.end(*busy, *waiting)


@pytest.mark.parametrize("parts", ["a", "b", "c"])
async def test_what_a_group_alone_serves_goes_with_it(parts: str) -> None:
    router = Shared(a="llama one", b="llama two", c="llama three")
    busy = [router.ask(number, "llama") for number in range(3)]
    await settle()
    own = {"a": "one", "b": "two", "c": "three"}
    asked = {
        group: [router.ask(10 * place + number, model) for number in range(place)]
        for place, (group, model) in enumerate(own.items(), 1)
    }
    shared = [router.ask(50 + number, "llama") for number in range(4)]
    await settle()
    assert router.waiting == {"a": 10}
    router.learn(parts, own[parts])
    left = min(set("abc") - {parts})
    number = len(asked[parts])
    assert router.waiting == {parts: number, left: 10 - number}
    router.learn(parts, f"llama {own[parts]}")
    assert list(router.waiting.values()) == [10]
    router.end(*busy, *shared, *(one for each in asked.values() for one in each))
    assert router.waiting == {}


async def test_groups_may_change_their_partners() -> None:
    router = Shared(a="x", b="x y", c="z", d="z y2")
    busy = [router.ask(number, model) for number, model in enumerate("xxzz")]
    await settle()
    waits = [router.ask(10 + number, "y") for number in range(2)]
    waits += [router.ask(20 + number, "z") for number in range(3)]
    await settle()
    assert router.waiting == {"a": 2, "c": 3}
    router.dispatcher.share((("b", "c"), ("a",), ("d",)), {"y": "b", "z": "d"})
    assert router.waiting == {"b": 2, "d": 3}
    router.dispatcher.share((("a", "d"), ("b",), ("c",)), {"z": "gone"})
    assert router.waiting == {"b": 2, "a": 3}
    router.dispatcher.share((("a",), ("b",), ("c",), ("d",)), {"z": "gone"})
    assert router.waiting == {"b": 2, "a": 3}
    router.end(*busy, *waits)


async def test_a_group_without_workers_goes_and_its_requests_stay() -> None:
    router = Shared(a="llama", b="llama")
    asked = [router.ask(number, "llama") for number in range(4)]
    await settle()
    on_a, on_b, *waiting = sorted(asked, key=lambda one: str(sent_to(one[1])).lower())
    assert sent([on_a, on_b, *waiting]) == ["a", "b", None, None]
    router.end(waiting[0])
    router.end(on_a)
    await settle()
    assert sent(waiting[1:]) == ["a"]
    router.end(waiting[1])
    asked = [router.ask(4, "llama"), router.ask(5, "llama")]
    router.end(asked[0])
    router.remove("a")
    assert (router.waiting, router.models.group("llama")) == ({"b": 1}, "b")
    router.end(asked[1])
    router.now_s += DISSOLVED_S + 1
    router.dispatcher.tick()
    assert list(router.cluster.groups) == list(router.dispatcher.queues) == ["b"]

    assert on_b[0].group == "a"
    assert router.dispatcher.may_ask_elsewhere(on_b[0], frozenset())
    assert not router.dispatcher.may_ask_elsewhere(on_b[0], {"b"})
    again, waiter = router.dispatcher.give_back(on_b[0], "b")
    await settle()
    assert (again.group, sent_to(waiter)) == ("b", "b")


async def test_where_all_groups_of_a_model_have_gone_nobody_serves_it() -> None:
    router = Shared(a="llama", b="llama")
    router.remove("a")
    router.remove("b")
    assert [group.name for group in router.models.serving("llama")] == ["a", "b"]
    router.now_s += DISSOLVED_S + 1
    router.dispatcher.tick()
    with pytest.raises(NoWorkerError):
        router.models.serving("llama")


@pytest.mark.parametrize(("parts", "expected"), [("a", "b"), ("b", "a")])
async def test_what_fails_once_groups_have_parted_waits_where_its_model_is(
    parts: str, expected: str
) -> None:
    router = Shared(a="llama", b="llama", c="llama")
    asked = [router.ask(number, "llama") for number in range(3)]
    await settle()
    on_b, *others = sorted(asked, key=lambda one: sent_to(one[1]) != "b")
    assert (on_b[0].group, sent_to(on_b[1])) == ("a", "b")
    router.learn(parts, "qwen")
    assert router.dispatcher.may_ask_elsewhere(on_b[0], {parts})
    assert not router.dispatcher.may_ask_elsewhere(on_b[0], set("abc") - {parts})
    again, waiter = router.dispatcher.give_back(on_b[0], "b")
    assert (again.group, router.waiting) == (expected, {expected: 1})
    router.end(*others)
    await settle()
    assert sent_to(waiter) in {"a", "c"} - {parts}
    router.end((again, waiter))


async def test_without_workers_its_own_requests_are_refused() -> None:
    router = Shared(a="llama", b="llama sql")
    running = [router.ask(number, "sql") for number in range(3)]
    await settle()
    assert sent(running) == ["b", None, None]
    router.end(running[0], running[1])
    await settle()
    router.end(running[2])
    asked = router.ask(3, "sql")
    assert asked[0].group == "b"
    router.remove("b")
    router.now_s += 2.0
    router.dispatcher.tick()
    with pytest.raises(NoWorkerError, match="group 'b'"):
        await asyncio.wait_for(asked[1], 5)


async def test_a_newcomer_gets_the_slot_of_a_group_that_had_none_before() -> None:
    router = Shared(a="llama", b="llama")
    first = [router.ask(number, "llama") for number in range(2)]
    await settle()
    assert sorted(map(str, sent(first))) == ["a", "b"]
    router.end(next(one for one in first if sent_to(one[1]) == "b"))
    newcomer = router.ask(2, "llama")
    await settle()
    assert sent([newcomer]) == ["b"]
    router.end(first[0] if sent_to(first[0][1]) == "a" else first[1], newcomer)


async def test_what_a_round_leaves_to_another_group_waits_for_no_tick() -> None:
    router = Shared(slots=2, a="llama", b="llama")
    first = [router.ask(number, "llama") for number in range(2)]
    await settle()
    at = {sent_to(waiter): (asked, waiter) for asked, waiter in first}
    router.end(at["b"])
    router.dispatcher.apply(Progressed(at["a"][0].id, 1))
    newcomer = router.ask(2, "llama")
    await settle()
    assert sent([newcomer]) == ["b"]
    router.end(at["a"], newcomer)


async def test_a_new_leader_knows_its_workers_by_full_snapshots_alone() -> None:
    router = Shared(a="llama")
    spec = WorkerSpec("b", "", "a", snapshots="tcp://127.0.0.1:1")
    router.dispatcher.join(spec)
    router.dispatcher.apply(WorkerUp("b"))

    def told(kind: Literal["full", "delta"], sequence: int, at_s: float) -> bool:
        router.dispatcher.apply(SnapshotReceived("b", snapshot(kind, sequence), at_s))
        return router.dispatcher.told_since(10.0)

    assert not router.dispatcher.told_since(10.0)
    assert not told("full", 1, 9.0)
    assert not told("delta", 2, 11.0), "it may have been made before, and read late"
    assert told("full", 1, 12.0), "a delta has overtaken it"
