"""API keys over a real socket: who is let in, what goes on to the engines, and limits."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from router.access.door import OPEN
from router.config.serve_settings import ServeSettings
from router.core.errors import ConfigError
from router.core.targets import Targets
from router.core.types import Outcome, WorkerSpec
from router.engines.health_checks import HealthMonitor, HealthSettings
from router.proxy.endpoints import ENDPOINTS
from router.serve.access import Access
from tests.support.scripted import ScriptedServer, scripted, soon, until
from tests.support.serving import Router, serving

ALICE, BOB = "sk-alice-0123456789", "sk-bob-0123456789ab"
ENGINES = "sk-engines-01234567"
KEYS = f"alice {ALICE} concurrency=2\nbob {BOB} rate=1/h\n"


def shown(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@dataclass
class Guarded:
    """A router with keys, before one engine with one slot and a place in the pool for two."""

    router: Router
    engine: ScriptedServer
    access: Access
    file: Path

    def settings(self) -> ServeSettings:
        return ServeSettings(api_key_file=str(self.file))

    async def answered(self, *asked: asyncio.Task[httpx.Response]) -> None:
        """Answer so many requests at the engine; their clients have the answers."""
        for _ in asked:
            await (await self.engine.next()).answer(b"{}")
        assert [(await soon(one)).status_code for one in asked] == [200] * len(asked)


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Guarded]:
    async with guarded_router(tmp_path) as guarded:
        yield guarded


@contextlib.asynccontextmanager
async def guarded_router(folder: Path, engine_key: str | None = None) -> AsyncIterator[Guarded]:
    file = folder / "keys"
    file.write_text(KEYS)
    access = Access(ServeSettings(api_key_file=str(file)), lambda: 0.0)
    async with (
        scripted() as (engine,),
        serving([engine], slots=1, pool_size=2, door=access.door, engine_key=engine_key) as router,
    ):
        yield Guarded(router, engine, access, file)


@pytest.mark.parametrize("path", [*ENDPOINTS, "/v1/models", "/v1/nothing", "/load", "/docs"])
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Basic {ALICE}"},
        {"authorization": ALICE},
        {"authorization": f"Bearer {ALICE}", "x-api-key": ALICE},
        {"authorization": "Bearer \xe9".encode("latin-1")},
    ],
)
async def test_without_a_key_that_counts_nobody_is_let_in(
    guarded: Guarded, path: str, headers: dict[str, str]
) -> None:
    answer = await guarded.router.http.post(path, headers=headers, json={})

    assert answer.status_code == 401
    assert answer.json()["error"]["type"] == "AuthenticationError"
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.headers["x-request-id"].startswith("es-")
    assert guarded.engine.connections == 0
    assert guarded.access.limits.unauthorized == 1


@pytest.mark.parametrize("path", sorted(OPEN))
async def test_whoever_watches_needs_no_key(guarded: Guarded, path: str) -> None:
    assert (await guarded.router.http.get(path)).status_code in (200, 404)


@pytest.mark.parametrize("headers", [shown(ALICE), {"x-api-key": ALICE}])
async def test_a_key_lets_in_and_goes_no_further(guarded: Guarded, headers: dict[str, str]) -> None:
    asked = guarded.router.post(headers=headers)
    exchange = await guarded.engine.next()
    assert guarded.router.dispatcher.cluster.groups["default"].held == {"alice": 1}
    await exchange.answer(b"{}")

    assert (await soon(asked)).status_code == 200
    assert ALICE not in str(exchange.headers)
    assert (await guarded.router.http.get("/v1/models", headers=headers)).status_code == 200


async def test_the_targets_of_a_key_stand_in_for_headers(tmp_path: Path) -> None:
    async with guarded_router(tmp_path) as guarded:
        guarded.file.write_text(f"carol {ALICE} ttft_ms=800 tpot_ms=40\nbob {BOB}\n")
        guarded.access.check(guarded.settings())
        guarded.access.take(guarded.settings())
        router, engine = guarded.router, guarded.engine
        first = router.post(headers=shown(ALICE))
        exchange = await engine.next()
        own = router.post(headers={**shown(ALICE), "X-SLO-TTFT-Ms": "300"})
        await until(lambda: router.waiting == 1)
        none = router.post(headers=shown(BOB))
        await until(lambda: router.waiting == 2)
        wrong = await soon(router.post(headers={**shown(BOB), "x-llm-d-slo-ttft-ms": "0"}))

        (pool,) = (decider.pool for decider in router.dispatcher.deciders.values())
        assert [each.targets for each in pool] == [Targets(0.3, 0.04), None]
        assert wrong.status_code == 400
        assert wrong.json()["error"]["param"] == "X-LLM-D-SLO-TTFT-Ms"
        await exchange.answer(b"{}")
        told = []
        for _ in (own, none):
            exchange = await engine.next()
            told.append(exchange.headers.get("x-slo-ttft-ms"))
            await exchange.answer(b"{}")
        assert sorted(told, key=str) == ["300", None]
        assert [(await soon(each)).status_code for each in (first, own, none)] == [200] * 3


async def test_engines_are_shown_their_own_key(tmp_path: Path) -> None:
    async with guarded_router(tmp_path, ENGINES) as guarded:
        asked = guarded.router.post(headers=shown(ALICE))
        exchange = await guarded.engine.next()
        await exchange.answer(b"{}")

        assert (await soon(asked)).status_code == 200
        assert exchange.headers["authorization"] == f"Bearer {ENGINES}"


async def test_a_router_with_nothing_but_the_engines_key_asks_for_none(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(ENGINES)
    access = Access(ServeSettings(worker_api_key_file=str(file)), lambda: 0.0)
    async with (
        scripted() as (engine,),
        serving([engine], door=access.door, engine_key=ENGINES) as router,
    ):
        asked = router.post(headers=shown(ALICE))
        exchange = await engine.next()
        await exchange.answer(b"{}")
        assert (await soon(asked)).status_code == 200

    assert exchange.headers["authorization"] == f"Bearer {ENGINES}"


async def test_a_router_without_keys_passes_on_what_clients_show() -> None:
    access = Access(ServeSettings(), lambda: 0.0)
    async with scripted() as (engine,), serving([engine], door=access.door) as router:
        asked = router.post(headers=shown(ALICE))
        exchange = await engine.next()
        await exchange.answer(b"{}")
        assert (await soon(asked)).status_code == 200

    assert exchange.headers["authorization"] == f"Bearer {ALICE}"


async def test_a_key_at_its_limit_is_told_when_to_come_again(guarded: Guarded) -> None:
    post = guarded.router.post
    under_way = [post(headers=shown(ALICE)), post(headers=shown(ALICE))]
    await until(lambda: guarded.access.limits.counts["alice"].under_way == 2)
    refused = await soon(post(headers=shown(ALICE)))
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert "2 requests of key 'alice' are under way" in refused.json()["error"]["message"]
    # Of what it only looks at, a key may have as much as it likes.
    assert (await guarded.router.http.get("/load", headers=shown(ALICE))).status_code == 200
    await guarded.answered(*under_way)

    await guarded.answered(post(headers=shown(BOB)))
    refused = await soon(post(headers=shown(BOB)))
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "3600")
    await guarded.router.settled()
    assert {name: c.under_way for name, c in guarded.access.limits.counts.items()} == {
        "alice": 0,
        "bob": 0,
    }


async def test_a_client_that_leaves_is_under_way_no_more(guarded: Guarded) -> None:
    asked = guarded.router.post(headers=shown(ALICE))
    exchange = await guarded.engine.next()
    asked.cancel()
    await exchange.left()
    await until(lambda: guarded.access.limits.counts["alice"].under_way == 0)
    await guarded.router.settled()


async def test_keys_are_read_again(guarded: Guarded) -> None:
    asked = guarded.router.post(headers=shown(ALICE))
    exchange = await guarded.engine.next()
    guarded.file.write_text(f"carol {BOB}")
    settings = guarded.settings()
    guarded.access.check(settings)
    guarded.access.take(settings)
    assert (await soon(guarded.router.post(headers=shown(ALICE)))).status_code == 401
    await exchange.answer(b"{}")
    assert (await soon(asked)).status_code == 200, "who was let in before goes on"

    guarded.file.write_text("carol")
    with pytest.raises(ConfigError, match="line 1"):
        guarded.access.check(settings)
    await guarded.answered(guarded.router.post(headers=shown(BOB)))
    assert guarded.access.limits.counts["carol"].requests == 1


def test_where_nobody_needed_a_key_it_takes_a_new_start_to_ask_for_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(KEYS)
    given = ServeSettings(api_key_file=str(keys), admin_key_file=str(keys))
    open_, keyed = (Access(each, lambda: 0.0).part for each in (ServeSettings(), given))
    assert not open_.given
    assert keyed.given == {"api_key_file", "admin_key_file"}


def test_files_that_others_can_read_are_told_at_the_start_and_when_they_are_read_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, engines = tmp_path / "keys", tmp_path / "engines"
    keys.write_text(KEYS)
    engines.write_text(ENGINES)
    keys.chmod(0o600)
    engines.chmod(0o640)
    settings = ServeSettings(api_key_file=str(keys), worker_api_key_file=str(engines))
    access = Access(settings, lambda: 0.0)
    of_group = f"{engines} can be read by its group on this machine: chmod 600 it"
    assert [record.getMessage() for record in caplog.records] == [of_group]

    caplog.clear()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: engines.stat().st_uid + 1)
        access.take(settings)
    assert not caplog.records, "another's file, which its group is to read"
    engines.unlink()
    keys.chmod(0o604)
    access.take(settings)
    of_all = f"{keys} can be read by everybody on this machine: chmod 600 it"
    assert [record.getMessage() for record in caplog.records] == [of_all]


def test_keys_that_come_and_go_are_named_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    settings = ServeSettings(api_key_file=str(keys), admin_key_file=str(keys))
    access = Access(settings, lambda: 0.0)
    caplog.set_level("INFO", "router.serve.access")
    access.check(settings)
    access.take(settings)
    assert not caplog.records
    carol = "carol sk-carol-0123456789\n"
    keys.write_text(carol + KEYS.replace(" concurrency=2", "").replace("bob ", "eve "))
    access.check(settings)
    access.take(settings)
    changes = "added carol eve, removed bob, changed alice"
    said = [f"keys of {whose}: {changes}" for whose in ("clients", "operators")]
    assert [record.getMessage() for record in caplog.records] == said


def test_a_certificate_with_its_key_is_secret_too() -> None:
    held = ServeSettings.model_construct(tls_cert="both.pem")
    apart = ServeSettings.model_construct(tls_cert="cert.pem", tls_key="key.pem")
    assert [each.secret_files for each in (held, apart)] == [["both.pem"], ["key.pem"]]


async def test_a_full_pool_makes_place_for_a_key_with_fewer_waiting(guarded: Guarded) -> None:
    router = guarded.router
    guarded.file.write_text(KEYS.replace(" concurrency=2", ""))
    guarded.access.check(guarded.settings())
    guarded.access.take(guarded.settings())
    running = router.post(headers=shown(ALICE))
    exchange = await guarded.engine.next()
    waiting = [router.post(headers=shown(ALICE))]
    await until(lambda: router.waiting == 1)
    waiting.append(router.post(headers=shown(ALICE)))
    await until(lambda: router.waiting == 2)
    assert (await soon(router.post(headers=shown(ALICE)))).status_code == 429

    newcomer = router.post(headers=shown(BOB))
    displaced = await soon(waiting.pop())

    assert (displaced.status_code, displaced.headers["retry-after"]) == (429, "1")
    assert "most of them with this key" in displaced.json()["error"]["message"]
    await exchange.answer(b"{}")
    await guarded.answered(newcomer, *waiting)
    assert (await soon(running)).status_code == 200
    assert router.outcomes == {Outcome.COMPLETED: 3, Outcome.DISPLACED: 1}
    assert router.stats.rejected == 1
    await router.settled()


async def test_health_checks_show_engines_their_key() -> None:
    async with scripted() as (engine,):
        spec = WorkerSpec("a", engine.url)
        monitor = HealthMonitor(
            [spec],
            lambda _: None,
            lambda *_: None,
            lambda _: None,
            ServeSettings().of(HealthSettings),
            key=ENGINES,
        )
        checking = asyncio.create_task(monitor.run())
        for path in ("/health", "/v1/models"):
            exchange = await engine.next()
            assert (exchange.target, exchange.headers["authorization"]) == (
                path,
                f"Bearer {ENGINES}",
            )
            await exchange.answer(b"{}")
        checking.cancel()
