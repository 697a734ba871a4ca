"""Workers that are added, drained and removed while requests are under way."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace

import pytest

from router.config.serve_settings import ServeSettings
from router.core.errors import ConfigError, NoWorkerError, PoolFullError, QueueTimeoutError
from router.core.events import Fetched, SnapshotReceived, WorkerDown, WorkerUp
from router.core.forecast.learned_profile import PROMPT_RATIO
from router.core.policies.baselines import PerRequest
from router.core.step_time import StepBudget, StepTime
from router.core.types import Dispatch, Outcome, WorkerSpec
from router.dispatch.group_queue import DISSOLVED_S
from router.dispatch.interface import Deciding
from router.dispatch.membership import BusyError, Fleet, UnknownWorkerError
from router.dispatch.models import ModelTable
from router.engines.worker_identity import SharedUrls
from router.serve.balancing import balancing
from tests.support.core import request, running, snapshot
from tests.support.dispatching import sent_to, settle
from tests.support.managed import Managed, worker
from tests.support.relaying import RawClient, routed
from tests.support.scripted import TIMEOUT_S, Exchange, ScriptedServer, soon, until
from tests.support.serving import Router

# coming


async def test_a_newcomer_takes_those_who_wait() -> None:
    rig = Managed({"a": 1})
    waiters = [rig.submit(i)[1] for i in range(2)]
    await settle()
    rig.add("b")
    await settle()
    assert [sent_to(waiter) for waiter in waiters] == ["a", "b"]


async def test_a_newcomer_of_another_group_has_its_own_lane() -> None:
    rig = Managed({"a": 1})
    rig.add("x", group="other")
    assert list(rig.dispatcher.deciders) == ["default", "other"]
    asking = replace(rig.submit(0)[0], id="es-other", group="other")
    waiter = rig.dispatcher.submit(asking)
    await settle()
    assert sent_to(waiter) == "x"


def test_a_worker_that_cannot_be_had_leaves_nothing_behind() -> None:
    rig = Managed({"a": 1})
    with pytest.raises(ConfigError, match="it cannot be had"):
        rig.add("bad")
    assert list(rig.group.workers) == ["a"]
    assert rig.states == {"a": "up"}
    assert rig.urls._url_of == {"a": "http://a"}


def test_a_worker_that_does_not_go_with_the_others_is_refused() -> None:
    rig = Managed({"a": 1})
    rig.add("b", snapshots="tcp://127.0.0.1:5")
    with pytest.raises(BusyError, match="there is a worker 'a' already"):
        rig.fleet.add(worker("a", slots=5))
    with pytest.raises(ConfigError, match="one snapshot endpoint"):
        rig.add("c", snapshots="tcp://127.0.0.1:5")
    with pytest.raises(ConfigError, match="prefill workers alone"):
        rig.add("p", group="nobody", role="prefill")
    assert rig.states == {"a": "up", "b": "up"}


async def test_where_nobody_says_how_many_requests_run_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Managed({"a": 2})
    rig.add("b", slots=None)
    rig.add("c", slots=None, snapshots="tcp://127.0.0.1:5")
    assert [rig.cluster.worker(worker_id).slots for worker_id in rig.states] == [2, 256, 256]
    warned = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len(warned) == 1
    assert warned[0].startswith("b: nobody says how many requests run at once, 256 are assumed")


# draining


async def test_a_drained_worker_finishes_what_it_has_and_gets_no_more() -> None:
    rig = Managed({"a": 2, "b": 2})
    first, _ = rig.submit(0)
    await settle()
    assert rig.fleet.drain("a") == ["a"]
    waiters = [rig.submit(i)[1] for i in range(1, 5)]
    await settle()
    assert [sent_to(waiter) for waiter in waiters] == ["b", "b", None, None]
    assert rig.states == {"a": "draining", "b": "up"}
    rig.finish(first)
    assert rig.states["a"] == "drained"
    rig.fleet.drain("a", draining=False)
    await settle()
    assert [sent_to(waiter) for waiter in waiters] == ["b", "b", "a", "a"]


async def test_where_all_are_drained_requests_wait_a_moment_and_are_then_told() -> None:
    rig = Managed({"a": 1})
    rig.fleet.drain("a")
    _, waiter = rig.submit(0)
    await settle()
    rig.now_s += 1.1
    rig.dispatcher.tick()
    with pytest.raises(NoWorkerError, match="a: draining"):
        await waiter
    with pytest.raises(NoWorkerError, match="a: draining"):
        rig.submit(1)


async def test_a_worker_that_dies_while_it_is_drained() -> None:
    rig = Managed({"a": 1, "b": 1})
    asking, _ = rig.submit(0)
    await settle()
    rig.fleet.remove("a", drain=True)
    rig.dispatcher.apply(WorkerDown("a", "gone"))
    _, again = rig.dispatcher.give_back(asking)
    rig.fleet.settle()
    await settle()
    assert (rig.states, sent_to(again)) == ({"b": "up"}, "b")
    assert rig.in_flight == 1


async def test_a_lockstep_group_is_drained_and_removed_as_one() -> None:
    rig = Managed({"a": 1, "b": 1})
    rig.dispatcher.set_lockstep(("default",))
    asking, _ = rig.submit(0)
    await settle()
    assert rig.fleet.drain("b") == ["a", "b"]
    assert rig.states == {"a": "draining", "b": "drained"}
    with pytest.raises(BusyError, match="a: requests are under way; drain, or force"):
        rig.fleet.remove("b")
    assert rig.fleet.remove("b", drain=True) == ["a", "b"]
    assert rig.states == {"a": "leaving"}
    rig.finish(asking)
    assert rig.states == {}


# leaving


async def test_a_worker_with_requests_is_not_removed_just_so() -> None:
    rig = Managed({"a": 1})
    asking, _ = rig.submit(0)
    await settle()
    with pytest.raises(BusyError):
        rig.fleet.remove("a")
    with pytest.raises(UnknownWorkerError):
        rig.fleet.remove("nobody")
    assert rig.fleet.remove("a", drain=True) == ["a"]
    assert rig.states == {"a": "leaving"}
    rig.finish(asking)
    assert rig.states == {}


async def test_requests_that_are_about_to_be_sent_are_counted() -> None:
    """Their worker is chosen, and nobody has connected to it yet."""
    rig = Managed({"a": 1, "b": 1})
    asking, waiter = rig.submit(0)
    await asyncio.sleep(0)
    rig.fleet.remove("a", drain=True)
    await settle()
    assert (sent_to(waiter), rig.states) == ("a", {"a": "leaving", "b": "up"})
    rig.finish(asking)
    assert rig.states == {"b": "up"}


async def test_requests_of_a_round_that_is_due_go_elsewhere() -> None:
    rig = Managed({"a": 1, "b": 1})
    _, waiter = rig.submit(0)
    rig.fleet.remove("a")
    await settle()
    assert sent_to(waiter) == "b"


async def test_by_force_requests_are_broken_off_until_none_is_left() -> None:
    rig = Managed({"a": 1, "b": 1})
    asking, _ = rig.submit(0)
    await settle()
    rig.fleet.remove("a", force=True)
    rig.fleet.settle()
    assert rig.broken == ["a", "a"]
    _, again = rig.dispatcher.give_back(asking)
    rig.fleet.settle()
    await settle()
    assert (rig.states, sent_to(again)) == ({"b": "up"}, "b")


async def test_the_same_worker_added_again_at_once_stays() -> None:
    rig = Managed({"a": 1})
    asking, _ = rig.submit(0)
    await settle()
    before = rig.cluster.worker("a")
    rig.fleet.remove("a", force=True)
    rig.fleet.add(before.spec)
    rig.broken.clear()
    rig.fleet.settle()
    assert rig.states == {"a": "up"}
    assert (rig.cluster.worker("a"), before.draining, rig.broken) == (before, False, [])
    rig.fleet.remove("a", drain=True)
    assert rig.broken == []
    rig.finish(asking)


async def test_another_worker_of_the_same_id_waits_for_the_first_to_leave() -> None:
    rig = Managed({"a": 1})
    asking, _ = rig.submit(0)
    await settle()
    rig.fleet.remove("a", drain=True)
    rig.fleet.add(worker("a", slots=7))
    assert [member.state for member in rig.fleet.members] == ["leaving", "joining"]
    with pytest.raises(BusyError):
        rig.fleet.add(worker("a", slots=8))
    rig.finish(asking)
    assert rig.cluster.worker("a").spec == worker("a", slots=7)
    rig.fleet.remove("a")
    assert rig.states == {}


async def test_the_last_worker_of_a_group() -> None:
    rig = Managed({"a": 1})
    asking, _ = rig.submit(0)
    await settle()
    _, waiter = rig.submit(1)
    rig.fleet.remove("a", drain=True)
    rig.finish(asking)
    assert (rig.states, rig.waiting) == ({}, 1)
    rig.add("b")
    await settle()
    assert sent_to(waiter) == "b"


async def test_a_group_that_stays_empty_is_gone_after_a_while() -> None:
    rig = Managed({"a": 1})
    _, waiter = rig.submit(0)
    rig.fleet.remove("a")
    rig.now_s += 1.1
    rig.dispatcher.tick()
    with pytest.raises(NoWorkerError, match="all have been removed"):
        await waiter
    with pytest.raises(NoWorkerError, match="all have been removed"):
        rig.submit(1)
    rig.now_s += DISSOLVED_S
    rig.dispatcher.tick()
    assert (rig.cluster.groups, dict(rig.dispatcher.deciders)) == ({}, {})
    late = request(9)
    with pytest.raises(NoWorkerError, match="has been removed"):
        rig.dispatcher.submit(late)
    rig.dispatcher.end(late, Outcome.ABORTED)
    rig.add("a")
    _, waiter = rig.submit(2)
    await settle()
    assert sent_to(waiter) == "a"


async def test_prefill_workers_come_and_go() -> None:
    rig = Managed({"a": 1})
    rig.add("p", role="prefill")
    prefills = rig.cluster.prefill_group("default")
    assert prefills is not None
    with pytest.raises(ConfigError, match="prefill workers alone"):
        rig.fleet.remove("a")
    asking = replace(request(9), group="default/prefill")
    waiter = rig.dispatcher.submit(asking)
    await settle()
    assert sent_to(waiter) == "p"
    rig.fleet.remove("p", drain=True)
    ready, _ = rig.dispatcher.hand_off(asking, 100, 30.0)
    rig.fleet.settle()
    assert rig.states["p"] == "leaving"  # until its KV has been fetched, or nobody wants it
    await settle()
    rig.dispatcher.apply(Fetched(ready.id))
    rig.fleet.settle()
    assert rig.states == {"a": "up"}
    assert rig.cluster.prefill_group("default") is None
    again, waiter = rig.dispatcher.prefill_again(ready)
    rig.now_s += 1.1
    rig.dispatcher.tick()
    with pytest.raises(NoWorkerError):
        await waiter
    rig.finish(again)


# the configuration


def test_a_configuration_that_changes_changes_what_is_different_in_it() -> None:
    rig = Managed({"a": 1, "b": 1})
    a, b = (rig.cluster.worker(i).spec for i in "ab")
    rig.add("x")
    rig.fleet.remove("b")
    rig.fleet.change([a, b, worker("c")], ())
    assert list(rig.states) == ["a", "x", "c"]  # b stays away, x stays
    rig.fleet.change([replace(a, slots=9), worker("c")], ("default",))
    assert (rig.cluster.worker("a").slots, rig.group.lockstep) == (9, True)
    rig.fleet.change([worker("c")], ())
    assert list(rig.states) == ["x", "c"]
    with pytest.raises(ConfigError):
        rig.fleet.change([worker("c"), worker("p", group="g", role="prefill")], ())
    assert list(rig.states) == ["x", "c"]
    rig.fleet.change([worker("c"), worker("bad")], ())  # said in the log
    assert list(rig.states) == ["x", "c"]


async def test_a_worker_that_moves_is_drained_first_and_keeps_its_streams() -> None:
    rig = Managed({"a": 1})
    asking, _ = rig.submit(0)
    await settle()
    moved = worker("a", group="default", rank=3, slots=1)
    rig.fleet.change([moved], ())
    assert [member.state for member in rig.fleet.members] == ["leaving", "joining"]
    rig.finish(asking)
    assert rig.cluster.worker("a").spec == moved


# URLs


def test_a_rank_is_named_once_there_have_been_several() -> None:
    one, other = worker("a", rank=0), replace(worker("b", rank=1), url="http://a:1")
    urls = SharedUrls([one])
    assert one.url not in urls.shared
    urls.join(other)
    assert one.url in urls.shared
    urls.leave("a")
    assert one.url in urls.shared
    urls.leave("b")
    urls.join(other)
    assert one.url in urls.shared, "as when it is amended"


# with clients and engines


@contextlib.asynccontextmanager
async def managed(router: Router, specs: Iterable[WorkerSpec]) -> AsyncIterator[Fleet]:
    """A fleet that sees to its workers until the block ends."""
    specs = tuple(specs)
    cluster, dispatcher = router.dispatcher.cluster, router.dispatcher
    fleet = Fleet(cluster, dispatcher, (SharedUrls(specs),), router.attempts.break_off, specs)
    task = asyncio.create_task(fleet.run())
    yield fleet
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def stream_begun(client: RawClient, engine: ScriptedServer) -> Exchange:
    """A client has the first token of a stream."""
    await client.post(stream=True)
    exchange = await engine.next()
    await exchange.start_stream()
    await exchange.chunks(b'data: {"choices":[{"text":"a"}]}\n\n')
    await client.read_until(b'"a"')
    return exchange


async def test_a_stream_goes_on_while_its_worker_is_drained_and_removed() -> None:
    async with routed(2) as (router, (one, other)):
        specs = [worker.spec for worker in router.workers]
        async with managed(router, specs) as fleet, RawClient(router) as client:
            exchange = await stream_begun(client, one)
            fleet.remove("a", drain=True)
            elsewhere = router.post()
            await (await other.next()).answer(b"{}")
            assert (await elsewhere).status_code == 200
            assert not await fleet.empty(["a"], 0.0)
            await exchange.chunks(b"data: [DONE]\n\n")
            await exchange.end_stream()
            assert (await client.read_to_end()).endswith(b"data: [DONE]\n\n")
            assert await fleet.empty(["a"], TIMEOUT_S)
        await router.settled()


async def test_by_force_a_stream_breaks_off_with_one_error_and_others_begin_elsewhere() -> None:
    async with routed(2, slots=1) as (router, (one, other)):
        specs = [worker.spec for worker in router.workers]
        async with managed(router, specs) as fleet, RawClient(router) as client:
            await stream_begun(client, one)
            fleet.remove("a", force=True)
            body = await client.read_to_end()
            assert body.count(b'"error"') == 1
            assert b"the worker is being removed" in body
            assert await fleet.empty(["a"], TIMEOUT_S)
            unanswered = router.post()
            last = await other.next()
            fleet.add(specs[0])
            router.dispatcher.apply(WorkerUp("a"))
            fleet.remove("b", force=True)
            await (await soon(one.next())).answer(b"{}")
            assert (await unanswered).status_code == 200
            await last.left()
        await router.settled()


# settings


async def test_pools_and_dispatch_take_other_settings() -> None:
    rig = Managed({"a": 1}, pool_size=1)
    rig.submit(0)
    await settle()
    _, first = rig.submit(1)
    with pytest.raises(PoolFullError):
        rig.submit(2)
    dispatcher = rig.dispatcher
    dispatcher.configure(
        replace(dispatcher._shared.settings, pool_size=2, queue_timeout_s=5.0, overcommit=3)
    )
    _, second = rig.submit(2)
    await settle()
    assert [sent_to(first), sent_to(second)] == ["a", "a"]
    dispatcher.configure(
        replace(dispatcher._shared.settings, overcommit=0, retry_budget=0.0, retry_min_per_s=0.0)
    )
    assert not rig.dispatcher.may_ask_elsewhere(request(3), frozenset())
    _, late = rig.submit(3)
    rig.now_s += 5.0
    rig.dispatcher.tick()
    with pytest.raises(QueueTimeoutError, match="within 5 s"):
        await late
    _, waiter = rig.submit(4)
    dispatcher.configure(replace(dispatcher._shared.settings, dispatch=Dispatch.INSTANT))
    await settle()
    assert sent_to(waiter) == "a"


async def test_another_policy_decides_from_the_next_round_on_for_those_who_decode() -> None:
    rig = Managed({"a": 2, "b": 2})
    rig.add("p", role="prefill")
    prefills = rig.dispatcher.deciders["default/prefill"].policy
    other = lambda: PerRequest(lambda *_: 1)  # noqa: E731
    rig.dispatcher.decide_by(Deciding(other, other))
    _, waiter = rig.submit(0)
    await settle()
    assert sent_to(waiter) == "b"
    assert rig.dispatcher.deciders["default/prefill"].policy is prefills
    rig.add("x", group="later")
    assert rig.dispatcher.deciders["later"].policy is not rig.dispatcher.deciders["default"].policy


async def test_a_fixed_step_time_counts_from_the_next_round_on() -> None:
    """For groups old and new, after a change of the policy, and no longer once it is learned."""
    rig, fixed = Managed({"a": 2, "b": 2}), StepTime(5e-3, 1e-7, 4e-5, 1e-5)
    rig.add("p", role="prefill")
    settings = ServeSettings(policy="jsq")
    reload = balancing(settings, rig.dispatcher).take
    reload(bfio := settings.model_copy(update={"policy": "bfio"}))
    assert ratios(rig) == (0.0, 0.0)
    reload(by_hand := bfio.model_copy(update={"step_time": "5e-3,1e-7,4e-5,1e-5"}))
    assert rig.group.step_time == fixed
    assert ratios(rig) == pytest.approx((400, 0)), "the other worker computes its prompts"
    reload(by_hand.model_copy(update={"horizon": 5}))
    assert ratios(rig) == pytest.approx((400, 0)), "by another look-ahead"
    rig.add("x", group="later")
    assert ratios(rig, "later") == pytest.approx((400, 100))
    reload(bfio)
    assert (ratios(rig), ratios(rig, "later")) == ((0.0, 0.0), (0.0, PROMPT_RATIO))


async def test_prompt_budgets_come_and_go_with_the_settings() -> None:
    rig = Managed({"a": 2, "b": 2})
    rig.add("p", role="prefill")
    settings = ServeSettings(step_time="0.01,1e-7,0,1e-4")
    reload = balancing(settings, rig.dispatcher).take
    reload(constant := settings.model_copy(update={"prompt_budget": "512"}))
    rig.add("x", group="later")
    groups = rig.dispatcher.cluster.groups
    assert {name: group.prompt_budget for name, group in groups.items()} == {
        "default": StepBudget(512),
        "default/prefill": None,
        "later": StepBudget(512),
    }
    reload(auto := constant.model_copy(update={"prompt_budget": "auto", "target_tpot_s": 0.02}))
    assert rig.group.prompt_budget is None
    for number, rank in enumerate("abab"):
        told = snapshot("full", 1 + number // 2, running("x", 9, 1), epoch=rank, step_s=0.01)
        rig.dispatcher.apply(SnapshotReceived(rank, told, 0.0))
    assert rig.dispatcher.prompt_budget("a") == rig.group.prompt_budget == StepBudget(99)
    reload(auto.model_copy(update={"pool_size": 7}))
    assert rig.group.prompt_budget == StepBudget(99)
    reload(settings)
    assert rig.group.prompt_budget is None


def ratios(rig: Managed, group: str = "default") -> tuple[float, float]:
    """What requests and prompt tokens count in KV tokens."""
    ahead = rig.dispatcher.deciders[group].look_ahead
    assert ahead is not None
    return ahead.profile.request_tokens, ahead.profile.prefill_beta


def test_a_group_goes_with_its_prefill_workers_group() -> None:
    rig = Managed({"a": 1})
    rig.add("p", role="prefill")
    rig.fleet.remove("p")
    rig.fleet.remove("a")
    rig.now_s += DISSOLVED_S
    rig.dispatcher.tick()
    assert (rig.cluster.groups, dict(rig.dispatcher.deciders)) == ({}, {})


def test_a_worker_has_left_the_cluster_when_its_followers_hear_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig, left = Managed({"a": 1, "b": 1}), list[list[str]]()
    workers = rig.cluster.groups["default"].workers
    monkeypatch.setattr(rig.urls, "leave", lambda _: left.append([*workers]))
    rig.fleet.remove("a")
    assert left == [["b"]]


def test_the_models_of_a_group_are_forgotten_with_it() -> None:
    rig = Managed({"a": 1})
    rig.add("x", group="other")
    models = ModelTable(rig.cluster)
    models.learn("a", {"tiny": {}})
    models.learn("x", {"huge": {}, "tiny": {}})
    rig.fleet.remove("a")
    rig.now_s += DISSOLVED_S
    rig.dispatcher.tick()
    assert list(models.names) == ["huge", "tiny"], "the other group serves it, too"
    models.learn("x", {"huge": {}, "tiny": {}})
    assert models.group("tiny") == "other"


async def test_nobody_waits_longer_than_told_for_a_worker_to_be_empty() -> None:
    rig = Managed({"a": 1})
    asking, _ = rig.submit(0)
    await settle()
    task = asyncio.create_task(rig.fleet.run())
    rig.fleet.drain("a")
    assert not await rig.fleet.empty(["a"], 0.01)
    rig.dispatcher.end(asking, Outcome.COMPLETED)
    assert await rig.fleet.empty(["a", "nobody"], TIMEOUT_S)
    await until(lambda: rig.states == {"a": "drained"})
    task.cancel()


async def test_a_prompt_whose_prefill_worker_is_removed_by_force_is_computed_elsewhere() -> None:
    async with routed(2, prefills=1, kept_s=30.0) as (router, (prefill, decode)):
        specs = [worker.spec for worker in router.workers]
        async with managed(router, specs) as fleet:
            answer = router.post()
            await prefill.next()
            fleet.remove("a", force=True)
            exchange = await decode.next()
            assert "kv_transfer_params" not in exchange.json
            await exchange.answer(b"{}")
            assert (await answer).status_code == 200
            assert await fleet.empty(["a"], TIMEOUT_S)
            assert router.dispatcher.cluster.prefill_group("default") is None
            alone = router.post()
            await (await decode.next()).answer(b"{}")
            assert (await alone).status_code == 200
        await router.settled()
