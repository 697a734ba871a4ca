"""A proxy's requests in another process's books: each is entered once and ended once."""

import asyncio
import contextlib
from functools import partial
from pathlib import Path

import pytest

from router.access.key_ring import Key, digest_of
from router.config.setting_sources import load_settings
from router.core.errors import (
    ConfigError,
    EvenstepError,
    KeyLimitError,
    NoWorkerError,
    PoolFullError,
    QueueTimeoutError,
)
from router.core.events import (
    Failed,
    Progressed,
    PromptCounted,
    Refused,
    RestRequested,
    Succeeded,
    WorkerDown,
)
from router.core.request_watcher import Served
from router.core.state.breaker import BreakerSettings
from router.core.types import Outcome, Request, WorkerSpec
from router.processes import proxy_links
from router.processes.remote_dispatcher import GONE_S, SILENT_S, TICK_S
from tests.support.certificates import certificate
from tests.support.core import request
from tests.support.linked import Decider, Proxy, socket_path
from tests.support.scripted import until


async def test_a_request_gets_its_worker_and_ends_once(tmp_path: Path) -> None:
    path = socket_path(tmp_path)
    async with Decider(path, {"a": 1}).up() as decider, Proxy(path).up() as proxy:
        asked, port = request(0, arrival=100.0), proxy.port
        worker = await port.submit(asked)
        port.began(asked, worker.id, 100.5)
        port.apply(Progressed(asked.id, 7))
        port.apply(PromptCounted(asked.id, 90))
        port.end(asked, Outcome.COMPLETED)
        port.end(asked, Outcome.FAILED)

        await until(lambda: decider.rig.stats.outcomes[Outcome.COMPLETED] == 1)
        assert worker == decider.rig.cluster.worker("a").spec
        assert dict(decider.rig.stats.outcomes) == {Outcome.COMPLETED: 1}
        assert (decider.rig.stats.ttft_s.total, decider.rig.in_flight) == (0.5, 0)
        assert proxy.diary.lines == [
            ("dispatched", asked.id),
            ("first byte", asked.id),
            ("ended", asked.id, Served("a", 90, 7), Outcome.COMPLETED),
        ]


async def test_who_leaves_the_pool_waits_no_more(tmp_path: Path) -> None:
    path = socket_path(tmp_path)
    async with Decider(path, {"a": 1}).up() as decider, Proxy(path).up() as proxy:
        await proxy.port.submit(request(0))
        waiting = request(1)
        waiter = proxy.port.submit(waiting)
        await until(lambda: decider.rig.waiting == 1)
        proxy.port.end(waiting, Outcome.ABORTED)

        await until(lambda: decider.rig.waiting == 0)
        assert waiter.cancelled()
        assert dict(decider.rig.stats.outcomes) == {Outcome.ABORTED: 1}


async def test_a_worker_that_comes_too_late_is_given_back(tmp_path: Path) -> None:
    path = socket_path(tmp_path)
    async with Decider(path, {"a": 1}).up() as decider, Proxy(path).up() as proxy:
        asked = request(0)
        proxy.port.submit(asked)
        await until(lambda: decider.rig.in_flight == 1)  # told, and not heard yet
        proxy.port.end(asked, Outcome.ABORTED)

        await until(lambda: decider.rig.in_flight == 0)
        assert dict(decider.rig.stats.outcomes) == {Outcome.ABORTED: 1}


async def test_errors_are_the_dispatchers_own(tmp_path: Path) -> None:
    path = socket_path(tmp_path)
    async with (
        Decider(path, {"a": 1}, pool_size=1).up() as decider,
        Proxy(path).up() as proxy,
    ):
        await proxy.port.submit(request(0))
        proxy.port.submit(request(1))
        with pytest.raises(PoolFullError, match=r"is full \(1 requests\)") as full:
            await proxy.port.submit(request(2))
        with pytest.raises(NoWorkerError, match="'gone' has been removed"):
            await proxy.port.submit(Request("es-9", "gone", 1))

        assert full.value.retry_after_s == 1
        assert decider.rig.stats.rejected == 1


async def test_who_waits_too_long_is_told_so_once(tmp_path: Path) -> None:
    path = socket_path(tmp_path)
    async with (
        Decider(path, {"a": 1}, queue_timeout_s=1.0).up() as decider,
        Proxy(path).up() as proxy,
    ):
        await proxy.port.submit(request(0, arrival=100.0))
        late = request(1, arrival=100.0)
        waiter = proxy.port.submit(late)
        await until(lambda: decider.rig.waiting == 1)
        decider.rig.now_s += 2
        decider.rig.dispatcher.tick()
        with pytest.raises(QueueTimeoutError, match="within 1 s"):
            await waiter
        proxy.port.end(late, Outcome.FAILED)

        assert proxy.diary.lines[-1] == ("ended", late.id, None, Outcome.EXPIRED)
        assert dict(decider.rig.stats.outcomes) == {Outcome.EXPIRED: 1}


async def test_a_failed_attempt_is_made_elsewhere(tmp_path: Path) -> None:
    path = socket_path(tmp_path)
    async with Decider(path, {"a": 1, "b": 1}).up() as decider, Proxy(path).up() as proxy:
        asked = request(0)
        first = await proxy.port.submit(asked)
        again, waiter = proxy.port.give_back(asked, first.id)
        second = await waiter

        assert {first.id, second.id} == {"a", "b"}
        assert again == asked.again(first.id)
        assert (decider.rig.stats.returned, decider.rig.in_flight) == (1, 1)


async def test_requests_go_with_their_proxy(tmp_path: Path) -> None:
    path = socket_path(tmp_path)
    key = Key("me", digest_of(b"sesame"), concurrency=2)
    async with Decider(path, {"a": 1}, [key]).up() as decider, Proxy(path, 1).up() as other:
        kept = await other.port.submit(request(0))
        async with Proxy(path).up() as proxy:
            proxy.http.connections = 3
            proxy.port.submit(Request("es-5", "default", 1, tenant="me"))
            proxy.port.submit(Request("es-6", "default", 1, tenant="me"))
            proxy.port.tick()
            await until(lambda: decider.rig.waiting == 2 and decider.http.connections == 3)
            assert decider.limits.counts["me"].under_way == 2

        await until(lambda: decider.rig.waiting == 0)
        assert dict(decider.rig.stats.outcomes) == {Outcome.ABORTED: 2}
        assert (kept.id, decider.rig.in_flight, decider.http.connections) == ("a", 1, 0)
        assert decider.limits.counts["me"].under_way == 0
        assert [link.slot for link in decider.links.proxies] == [1]


async def test_limits_of_a_key_hold_over_all_proxies(tmp_path: Path) -> None:
    path = socket_path(tmp_path)
    key = Key("me", digest_of(b"sesame"), concurrency=2)
    async with (
        Decider(path, {"a": 9}, [key]).up() as decider,
        Proxy(path).up() as one,
        Proxy(path, 1).up() as other,
    ):
        asked = [Request(f"es-{i}", "default", 1, tenant="me") for i in range(4)]
        await one.port.submit(asked[0])
        await other.port.submit(asked[1])
        with pytest.raises(KeyLimitError, match="2 requests of key 'me' are under way") as limited:
            await one.port.submit(asked[2])
        one.port.end(asked[0], Outcome.COMPLETED)
        await until(lambda: decider.limits.counts["me"].under_way == 1)
        await other.port.submit(asked[3])

        assert limited.value.retry_after_s == 1
        assert decider.limits.counts["me"].limited == {"concurrency": 1, "rate": 0}


async def test_a_key_is_held_by_a_request_that_is_tried_anew(tmp_path: Path) -> None:
    path = socket_path(tmp_path)
    key = Key("me", digest_of(b"sesame"), concurrency=1)
    async with Decider(path, {"a": 1, "b": 1}, [key]).up() as decider, Proxy(path).up() as proxy:
        asked = Request("es-0", "default", 1, tenant="me")
        first = await proxy.port.submit(asked)
        again, waiter = proxy.port.give_back(asked, first.id)
        await waiter
        assert decider.limits.counts["me"].under_way == 1
        proxy.port.end(again, Outcome.COMPLETED)
        await until(lambda: decider.limits.counts["me"].under_way == 0)


async def test_another_decider_knows_what_is_under_way(tmp_path: Path) -> None:
    path = socket_path(tmp_path)
    key = Key("me", digest_of(b"sesame"), concurrency=1)
    streaming, ending = (Request(f"es-{i}", "default", 9, tenant="me") for i in range(2))
    waiting = Request("es-2", "default", 9)
    async with contextlib.AsyncExitStack() as proxies:
        async with Decider(path, {"a": 3}).up():
            proxy = await proxies.enter_async_context(Proxy(path).up())
            await proxy.port.submit(streaming)
            await proxy.port.submit(ending)
            proxy.port.apply(Progressed(streaming.id, 40))
        await until(lambda: not proxy.port.here)
        proxy.port.end(ending, Outcome.COMPLETED)
        waiter = proxy.port.submit(waiting)

        async with Decider(path, {"a": 3, "b": 1}, [key]).up() as decider:
            assert (await waiter).id in {"a", "b"}
            worker = decider.rig.cluster.worker("a")
            await until(lambda: decider.rig.stats.outcomes[Outcome.COMPLETED] == 1)
            assert decider.rig.in_flight == 2
            assert worker.served(streaming.id, complete=False) == (9, 40)
            assert decider.limits.counts["me"].under_way == 1
            proxy.port.end(streaming, Outcome.FAILED)
            proxy.port.end(waiting, Outcome.ABORTED)
            await until(lambda: decider.rig.in_flight == 0)
            outcomes = {Outcome.COMPLETED: 1, Outcome.FAILED: 1, Outcome.ABORTED: 1}
            assert dict(decider.rig.stats.outcomes) == outcomes
            assert decider.limits.counts["me"].under_way == 0


async def test_nobody_waits_for_long_while_nobody_decides(tmp_path: Path) -> None:
    path = socket_path(tmp_path)
    async with contextlib.AsyncExitStack() as proxies:
        async with Decider(path, {"a": 1}).up():
            proxy = await proxies.enter_async_context(Proxy(path).up())
            await proxy.port.submit(request(0))
        await until(lambda: not proxy.port.here)
        waiter = proxy.port.submit(request(1))
        proxy.port.tick()
        assert not waiter.done()

        proxy.now_s += GONE_S
        proxy.port.tick()
        with pytest.raises(NoWorkerError, match="retry"):
            await waiter
        with pytest.raises(NoWorkerError, match="retry"):
            proxy.port.submit(request(2))


async def test_what_has_to_be_known_at_once_is_known_here(tmp_path: Path) -> None:
    path = socket_path(tmp_path)
    async with Decider(path, {"a": 1, "b": 1}).up() as decider, Proxy(path).up() as proxy:
        ask = proxy.port.may_ask_elsewhere
        assert [ask(request(0), {"a", "b"}), ask(request(0), {"a"})] == [False, True]
        assert [ask(request(0), {"a"}), ask(request(0), {"a"})] == [True, False]  # 0.2/s, for 10 s
        proxy.port.tick()
        await until(lambda: decider.rig.stats.unreturned == 1)

        decider.rig.dispatcher.apply(WorkerDown("b", "gone"))
        known = proxy.port.directory
        await until(lambda: proxy.port.directory is not known)
        assert proxy.port.directory.groups["default"].askable == {"a"}
        assert not ask(request(0), {"a"})


async def test_a_worker_whose_ejection_ends_is_known_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_links, "_BEAT_S", 3600.0)  # what is learned goes out as seldom
    path = socket_path(tmp_path)
    async with Decider(path, {"a": 1, "b": 1}).up() as decider, Proxy(path).up() as proxy:
        for number in range(BreakerSettings().breaker_failures):
            decider.rig.dispatcher.apply(Failed(str(number), "b", decider.rig.now_s))
        await until(lambda: proxy.port.directory.groups["default"].askable == {"a"})
        decider.rig.now_s += BreakerSettings().breaker_open_s
        decider.rig.dispatcher.tick()
        await until(lambda: proxy.port.directory.groups["default"].askable == {"a", "b"})


async def test_what_proxies_count_comes_together(tmp_path: Path) -> None:
    path = socket_path(tmp_path)
    async with (
        Decider(path, {"a": 1}).up() as decider,
        Proxy(path).up() as one,
        Proxy(path, 1).up() as other,
    ):
        for proxy in (one, other):
            proxy.tallies.tokens["default"].itl_s.observe(0.02)
            proxy.tallies.tokens["default"].tpot_s.observe(0.03)
            proxy.http.connections, proxy.http.refused[413] = 2, 1
            proxy.port.judged("default", "met")
            proxy.tallies.unauthorized += 1
            proxy.port.tick()
            proxy.port.tick()  # has no news
        tokens = decider.rig.stats.tokens
        await until(lambda: sum(tokens.itl_s.counts) == 2)

        assert (sum(tokens.tpot_s.counts), tokens.itl_s.total) == (2, 0.04)
        assert dict(decider.rig.stats.verdicts) == {"met": 2}
        assert (decider.http.connections, decider.http.refused[413]) == (4, 2)
        assert decider.limits.unauthorized == 2
        one.http.connections = 0
        one.port.tick()
        await until(lambda: decider.http.connections == 2)


def recalled(proxy: Proxy) -> bool:
    return proxy.recalled == [("a", "it is gone", True)]


async def test_a_recall_reaches_all_proxies(tmp_path: Path) -> None:
    path = socket_path(tmp_path)
    async with (
        Decider(path, {"a": 1}).up() as decider,
        Proxy(path).up() as one,
        Proxy(path, 1).up() as other,
    ):
        decider.links.recall("a", "it is gone", True)
        for proxy in (one, other):
            await until(partial(recalled, proxy))


async def test_what_is_said_of_workers_is_heard(tmp_path: Path) -> None:
    path = socket_path(tmp_path)
    async with Decider(path, {"a": 1, "b": 1}).up() as decider, Proxy(path).up() as proxy:
        asked = request(0)
        worker = await proxy.port.submit(asked)
        proxy.port.apply(Failed(asked.id, worker.id, proxy.now_s))
        proxy.port.apply(Refused(asked.id, worker.id))
        proxy.port.apply(RestRequested(worker.id, proxy.now_s, 2.0))
        proxy.port.apply(RestRequested("nobody", proxy.now_s, 2.0))
        proxy.port.trouble(worker.id, "cannot connect")
        proxy.port.apply(Succeeded("es-unknown", "nobody", proxy.now_s))

        await until(lambda: decider.troubles == [(worker.id, "cannot connect")])
        breaker = decider.rig.cluster.worker(worker.id).breaker
        breaker.look(decider.rig.now_s)
        assert breaker.capacity(1, 1, 0) == 0


@pytest.mark.parametrize("where", ["proxy", "decider"])
async def test_what_one_request_breaks_is_one_connection(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = socket_path(tmp_path)
    async with Decider(path, {"a": 1}).up() as decider, Proxy(path).up() as proxy:
        kept, waiting = request(0), request(1)
        await proxy.port.submit(kept)
        waiter = proxy.port.submit(waiting)
        bad = Request("es-9", "default", 1, priority=2**64 if where == "proxy" else 0)
        if where == "decider":
            submit = decider.rig.dispatcher.submit

            def fails(asked: Request) -> asyncio.Future[WorkerSpec]:
                if asked.id == bad.id:
                    raise ZeroDivisionError
                return submit(asked)

            monkeypatch.setattr(decider.rig.dispatcher, "submit", fails)
        with pytest.raises(EvenstepError, match="deci"):
            async with asyncio.timeout(30):
                await proxy.port.submit(bad)

        await until(lambda: decider.rig.in_flight == 1 and proxy.port.here)
        proxy.port.end(kept, Outcome.COMPLETED)
        if where == "proxy":
            assert (await waiter).id == "a"
        else:  # those that have waited all the while are told to come again with it
            with pytest.raises(NoWorkerError, match="retry"):
                await waiter
        proxy.port.end(waiting, Outcome.COMPLETED)
        proxy.port.tick()
        await until(lambda: decider.rig.in_flight == 0 and decider.counts.broken > 0)
        assert (await proxy.port.submit(request(2))).id == "a"


async def test_who_decides_and_says_nothing_is_as_good_as_gone(tmp_path: Path) -> None:
    path = socket_path(tmp_path)
    async with Decider(path, {"a": 1}).up() as decider, Proxy(path).up() as proxy:
        held = request(0)
        await proxy.port.submit(held)
        waiter = proxy.port.submit(request(1))
        await until(lambda: decider.rig.waiting == 1)
        for _ in range(int(SILENT_S / TICK_S)):  # not a moment's time for the other end
            assert proxy.port.here
            proxy.port.tick()
        assert not proxy.port.here
        with pytest.raises(NoWorkerError, match="retry"):
            await waiter
        with pytest.raises(NoWorkerError, match="retry"):
            proxy.port.submit(request(2))

        await until(lambda: proxy.port.here and decider.rig.waiting == 0)
        assert decider.rig.in_flight == 1
        proxy.port.end(held, Outcome.COMPLETED)
        assert (await proxy.port.submit(request(3))).id == "a"


async def test_what_one_proxy_refuses_none_takes_and_all_are_waited_for(tmp_path: Path) -> None:
    path = socket_path(tmp_path)
    cert, key = certificate(tmp_path, "one")
    settings = load_settings({"tls_cert": str(cert), "tls_key": str(key)})
    async with Decider(path, {"a": 1}, proxies=2).up() as decider, Proxy(path).up() as one:
        follow = asyncio.create_task(decider.links.follow())
        await until(lambda: len(decider.links.proxies) == 1)
        assert not (await asyncio.wait((follow,), timeout=0.2))[0]  # the other is not there yet
        async with Proxy(path, 1).up() as other:
            assert await follow == []
            await decider.links.agree(settings)
            other.refusal = "no"
            with pytest.raises(ConfigError, match=r"^proxy 1: no$"):
                await decider.links.agree(settings)
    assert one.refusal == ""


async def test_what_is_no_message_ends_a_connection(tmp_path: Path) -> None:
    path = socket_path(tmp_path)
    async with Decider(path, {"a": 1}).up() as decider, Proxy(path).up():
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"\0\0\0\x01\xc1")
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), 30)
        writer.close()
        assert len(decider.links.proxies) == 1
