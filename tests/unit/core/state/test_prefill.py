"""Prefill workers: how busy they are, what they keep, and for how long."""

import asyncio
from dataclasses import replace

import msgspec
import pytest

from router.core.events import (
    Arrived,
    Dispatched,
    Ended,
    EngineFailed,
    Fetched,
    GaugesReceived,
    Prefilled,
    Returned,
    SnapshotReceived,
    WorkerDown,
    WorkerUp,
)
from router.core.policies.baselines import PerRequest, fcfs
from router.core.prefix.ids import ID_BYTES, chain, seed
from router.core.state.cluster import Cluster
from router.core.state.foreign_load import Gauges
from router.core.state.prefill_worker import MEMORY_SHARE, PrefillWorker
from router.core.types import Content, Dispatch, KvGroup, Outcome, Request, WorkerSpec
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.interface import Deciding
from tests.support.clusters import Phase, phase
from tests.support.core import running, snapshot
from tests.support.dispatching import dispatch_settings

P = "default/prefill"


def cluster(chunk: int = 100) -> Cluster:
    specs = [WorkerSpec("p", "http://p", role="prefill"), WorkerSpec("d", "http://d")]
    made = Cluster(specs)
    for spec in specs:
        made.apply(WorkerUp(spec.id))
    worker(made).chunk_tokens = chunk
    return made


def worker(of: Cluster) -> PrefillWorker:
    found = of.worker("p")
    assert isinstance(found, PrefillWorker)
    return found


def name(number: int, again: str = "") -> str:
    return f"es-{number:020x}{again}"


def send(to: Cluster, number: int, tokens: int) -> str:
    to.apply(Arrived(Request(name(number), P, tokens)))
    to.apply(Dispatched(name(number), "p"))
    return name(number)


def finish(of: Cluster, number: int, tokens: int, until_s: float | None = 10.0) -> str:
    ready = Request(name(number, "r1"), "default", tokens)
    of.apply(Prefilled(name(number), ready, until_s))
    return ready.id


def capacity(of: Cluster) -> int:
    return worker(of).view(Dispatch.POOL).capacity


def test_groups_of_their_own() -> None:
    made = cluster()
    assert [*made.groups] == ["default", P]
    served = made.groups["default"]
    prefills = made.prefill_group("default")
    assert prefills is not None
    assert prefills.serves is served
    assert prefills.token_rate is served.token_rate
    assert made.prefill_group(P) is None
    assert [w.spec.id for w in served.live_workers()] == ["d"]


def test_prefill_workers_are_in_nobodys_lockstep() -> None:
    names = ("p", "q", "d", "e")
    specs = [WorkerSpec(each, f"http://{each}", role="prefill") for each in names[:2]]
    specs += [WorkerSpec(each, f"http://{each}") for each in names[2:]]
    made = Cluster(specs, lockstep=["default"])
    for each in names:
        made.apply(WorkerUp(each))
    made.apply(WorkerDown("p", "gone"))
    assert [each for each in names if made.worker(each).live] == ["q", "d", "e"]
    made.apply(WorkerDown("d", "gone"))
    assert [each for each in names if made.worker(each).live] == ["q"]


def test_phases() -> None:
    made = cluster()
    made.apply(Arrived(Request(name(1), P, 50)))
    assert phase(made, name(1)) is Phase.ARRIVED
    made.apply(Dispatched(name(1), "p"))
    assert phase(made, name(1)) is Phase.PREFILLING
    ready = finish(made, 1, 50)
    assert phase(made, name(1)) is Phase.ENDED
    assert phase(made, ready) is Phase.READY
    assert (made.groups[P].line.waiting, made.groups["default"].line.waiting) == (0, 1)
    made.apply(Dispatched(ready, "d"))
    assert phase(made, ready) is Phase.DECODING
    made.apply(Ended(ready, Outcome.COMPLETED))
    assert phase(made, ready) is Phase.ENDED


def test_a_worker_with_two_chunks_to_compute_is_given_no_more() -> None:
    made = cluster(chunk=100)
    send(made, 1, 150)
    assert capacity(made) == 1
    send(made, 2, 60)
    assert (worker(made).load_tokens, capacity(made)) == (210, 0)
    made.apply(Ended(name(1), Outcome.ABORTED))
    assert (worker(made).load_tokens, capacity(made)) == (60, 1)


@pytest.mark.parametrize("computed", [10, 100, 400])
def test_a_first_step_that_computes_little_does_not_starve_it(computed: int) -> None:
    """It may have begun the prompt with what another one left of the chunk."""
    made = cluster(chunk=100)
    send(made, 1, 150 + computed)
    told = snapshot("full", 1, running(f"cmpl-{name(1)}-0-ab", 150 + computed, 0, prefill_left=150))
    told = msgspec.structs.replace(told, scheduled_prefill_tokens=computed)
    made.apply(SnapshotReceived("p", told, 0.0))
    assert (worker(made).load_tokens, capacity(made)) == (150, 1)
    send(made, 2, 60)
    assert capacity(made) == (computed > 100), "with larger chunks there is room for more"


def test_snapshots_tell_what_is_left_to_compute() -> None:
    made = cluster(chunk=100)
    send(made, 1, 150)
    send(made, 2, 60)
    shown = snapshot("full", 1, running(f"cmpl-{name(1)}-0-ab", 150, 0, prefill_left=30))
    made.apply(SnapshotReceived("p", shown, 0.0))
    assert (worker(made).load_tokens, capacity(made)) == (90, 1)
    assert all(totals.steps == 0 for totals in made.groups[P].totals.values())  # no barrier


@pytest.mark.parametrize(("others", "chosen"), [(0, "p"), (100, "p"), (140, "q")])
def test_a_prompt_goes_where_least_is_left_to_compute(others: int, chosen: str) -> None:
    """That is what is pending there, and what is not cached there of the prompt."""
    specs = [WorkerSpec(each, f"http://{each}", role="prefill") for each in "pq"]
    specs.append(WorkerSpec("d", "http://d"))
    dispatcher = Dispatcher(
        Cluster(specs),
        Deciding(lambda: PerRequest(fcfs), lambda: PerRequest(fcfs)),
        dispatch_settings(),
        float,
    )
    for spec in specs:
        dispatcher.apply(WorkerUp(spec.id))
    pieces = chain(range(160), seed())
    empty = msgspec.structs.replace(snapshot("full", 1), cache_block=16)
    holds = msgspec.structs.replace(empty, blocks_stored=pieces[: ID_BYTES * 10])
    asked = Request(name(9), P, 160, content=Content(pieces=pieces))
    dispatcher.apply(SnapshotReceived("p", holds, 0.0))
    dispatcher.apply(SnapshotReceived("q", empty, 0.0))
    made = dispatcher.cluster
    # It finds 144 of its 160 tokens, as the last token is computed in any case.
    made.apply(Arrived(replace(asked, id=name(8))))
    made.apply(Dispatched(name(8), "p"))
    assert worker(made).load_tokens == 16
    if others:
        send(made, 1, others)

    async def submit() -> str:
        return (await dispatcher.submit(asked)).id

    assert asyncio.run(submit()) == chosen


def test_kv_is_kept_until_it_is_fetched() -> None:
    made = cluster()
    send(made, 1, 50)
    ready = finish(made, 1, 55)
    assert (worker(made).kept_tokens, made.keeps(ready)) == (55, True)
    made.apply(Dispatched(ready, "d"))
    made.apply(Fetched(ready))
    assert (worker(made).kept_tokens, made.keeps(ready)) == (0, False)
    made.apply(Fetched(ready))
    assert worker(made).kept_tokens == 0


def test_kv_that_others_find_by_content_is_not_kept() -> None:
    made = cluster()
    send(made, 1, 50)
    ready = finish(made, 1, 50, None)
    assert (worker(made).kept_tokens, made.keeps(ready)) == (0, False)
    made.apply(Fetched(ready))
    assert worker(made).kept_tokens == 0


def test_kv_that_nobody_fetches_expires() -> None:
    made = cluster()
    for number in (1, 2):
        send(made, number, 50)
    first, second = finish(made, 1, 50, 10.0), finish(made, 2, 70, 20.0)
    made.apply(Ended(first, Outcome.ABORTED))
    assert worker(made).kept_tokens == 120
    assert worker(made).expire(9.9) == 0
    assert worker(made).expire(10.0) == 50
    assert made.keeps(second)
    assert worker(made).expire(30.0) == 70
    assert not made.keeps(second)
    made.apply(Dispatched(second, "d"))
    assert worker(made).kept_tokens == 0


def test_kv_that_was_handed_out_is_left_for_nobody_only_if_it_comes_back() -> None:
    made = cluster()
    ready = []
    for number in (1, 2, 3):
        send(made, number, 50)
        ready.append(finish(made, number, 50 + number, 10.0))
        made.apply(Dispatched(ready[-1], "d"))
    made.apply(Returned(ready[1], Request(name(2, "r2"), P, 52)))
    made.apply(Ended(ready[2], Outcome.ABORTED))
    assert worker(made).kept_tokens == 51 + 52 + 53
    assert worker(made).expire(10.0) == 52 + 53
    assert worker(made).kept_tokens == 0


@pytest.mark.parametrize("source", ["snapshots", "metrics"])
def test_of_kv_that_was_handed_out_the_engine_says_how_much_is_left(source: str) -> None:
    """An answer that comes whole is not heard of before its end."""
    made = cluster(chunk=1000)

    def told(sequence: int, used: int) -> None:
        if source == "snapshots":
            shown = msgspec.structs.replace(
                snapshot("full", sequence), kv_groups=(KvGroup(10, used // 10, 20),)
            )
            made.apply(SnapshotReceived("p", shown, 0.0))
        else:
            made.apply(GaugesReceived("p", Gauges(0, kv_usage=used / 200, kv_tokens=200), 0.0))

    told(1, 0)
    send(made, 1, 190)
    ready = finish(made, 1, 190, 10.0)
    assert capacity(made) == 0  # it waits, so that it is there
    told(2, 190)
    made.apply(Dispatched(ready, "d"))
    assert capacity(made) == 0
    told(3, 0)
    assert (capacity(made), worker(made).kept_tokens) == (1, 190)
    send(made, 2, 180)
    assert capacity(made) == 0
    made.apply(Ended(name(2), Outcome.ABORTED))
    assert capacity(made) == 1
    made.apply(Returned(ready, Request(name(1, "r2"), P, 190)))
    assert (capacity(made), worker(made).kept_tokens) == (1, 190)  # it was fetched before that
    told(4, 190)
    assert capacity(made) == 0


def test_kv_is_lost_with_its_engine() -> None:
    """A worker may be down for less: its engine may have sent what came after that."""
    made = cluster()
    send(made, 1, 50)
    send(made, 2, 70)
    first = finish(made, 1, 50)
    made.apply(WorkerDown("p", "one broken connection"))
    second = finish(made, 2, 70)
    assert (worker(made).kept_tokens, made.keeps(first), made.keeps(second)) == (120, True, True)
    made.apply(EngineFailed("p"))
    assert (worker(made).kept_tokens, made.keeps(first), made.keeps(second)) == (0, False, False)
    made.apply(EngineFailed("d"))  # it keeps nothing for anybody
    made.apply(Ended(first, Outcome.ABORTED))
    assert worker(made).kept_tokens == 0


def test_a_request_may_go_whole_from_the_queue_or_back_to_it() -> None:
    made = cluster()
    made.apply(Arrived(Request(name(1), P, 50)))
    made.apply(Returned(name(1), Request(name(1, "r1"), "default", 50)))
    assert (made.groups[P].line.waiting, made.groups["default"].line.waiting) == (0, 1)
    made.apply(Dispatched(name(1, "r1"), "d"))
    made.apply(Returned(name(1, "r1"), Request(name(1, "r2"), P, 50)))
    assert (made.groups[P].line.waiting, made.groups["default"].line.waiting) == (1, 0)
    assert phase(made, name(1, "r2")) is Phase.ARRIVED


@pytest.mark.parametrize("source", ["snapshots", "metrics"])
def test_memory_bounds_what_is_computed_and_kept(source: str) -> None:
    made = cluster(chunk=1000)
    if source == "snapshots":
        groups = KvGroup(10, 0, 40), KvGroup(10, 0, 40)  # two groups share them
        empty = msgspec.structs.replace(snapshot("full", 1), kv_groups=groups)
        made.apply(SnapshotReceived("p", empty, 0.0))
    else:
        made.apply(GaugesReceived("p", Gauges(0, kv_tokens=200), 0.0))
    assert worker(made).kv_tokens == 200
    assert capacity(made) == 1
    send(made, 1, 150)
    assert capacity(made) == 1
    finish(made, 1, 150)
    assert capacity(made) == 1
    send(made, 2, int(MEMORY_SHARE * 200) - 150)
    assert capacity(made) == 0
    worker(made).expire(100.0)
    assert capacity(made) == 1


def test_what_is_computed_of_a_prompt_takes_memory_too() -> None:
    made = cluster(chunk=1000)
    told = snapshot("full", 1, running(f"cmpl-{name(1)}-0-ab", 190, 0, prefill_left=20))
    full = msgspec.structs.replace(told, kv_groups=(KvGroup(10, 17, 20),))
    send(made, 1, 190)
    made.apply(SnapshotReceived("p", full, 0.0))
    assert (worker(made).load_tokens, capacity(made)) == (20, 0)


def test_a_prompt_is_computed_once_for_several_answers() -> None:
    made = cluster(chunk=100)
    made.apply(Arrived(Request(name(1), P, 150, slots=4)))
    made.apply(Dispatched(name(1), "p"))
    assert (worker(made).requests, worker(made).load_tokens, capacity(made)) == (1, 150, 1)
    shown = snapshot("full", 1, running(f"cmpl-{name(1)}-0-ab", 150, 0, prefill_left=30))
    made.apply(SnapshotReceived("p", shown, 0.0))
    assert (worker(made).requests, worker(made).load_tokens) == (1, 30)


def test_kv_that_gauges_show_is_nothing_to_compute() -> None:
    """Whose it is does not show either: what is kept is in it."""
    made = cluster(chunk=100)
    made.apply(GaugesReceived("p", Gauges(running=1, kv_usage=0.5, kv_tokens=1000), 0.0))
    assert worker(made).foreign.load_tokens == 500
    assert (worker(made).load_tokens, capacity(made)) == (0, 1)


def test_prompts_that_are_tiny_are_bounded_by_their_number() -> None:
    specs = [WorkerSpec("p", "http://p", role="prefill", slots=2), WorkerSpec("d", "http://d")]
    made = Cluster(specs)
    made.apply(WorkerUp("p"))
    for number in range(2 * 2):
        assert capacity(made) == 1
        send(made, number, 1)
    assert capacity(made) == 0


def test_a_worker_that_has_just_refused_a_prompt_is_given_none() -> None:
    made = cluster()
    assert made.groups[P].prefill_workers == [worker(made)]
    assert made.groups["default"].prefill_workers == []
    worker(made).refusing = True
    assert capacity(made) == 0


def test_one_prompt_may_be_larger_than_all_memory() -> None:
    made = cluster()
    made.apply(GaugesReceived("p", Gauges(0, kv_tokens=10), 0.0))
    assert capacity(made) == 1
