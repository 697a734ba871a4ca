"""Keys, limits and tenants of requests that a gateway serves."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from router.config.serve_settings import ServeSettings
from router.serve.access import Access
from tests.support.gateway import Gateway, gateway, settled
from tests.support.scripted import ScriptedServer, scripted, soon, until

ALICE = "sk-alice-0123456789"
SHOWN = {"authorization": f"Bearer {ALICE}"}
pytestmark = pytest.mark.parametrize("ext_proc", [False, True], ids=["ext_authz", "ext_proc"])


@asynccontextmanager
async def guarded(
    folder: Path, ext_proc: bool, engine_key: str | None = None, tells_key: bool = True
) -> AsyncIterator[tuple[Gateway, ScriptedServer]]:
    file = folder / "keys"
    file.write_text(f"alice {ALICE} concurrency=1\n")
    access = Access(ServeSettings(api_key_file=str(file)), lambda: 0.0)
    known: dict[str, Any] = {"door": access.door, "engine_key": engine_key, "tells_key": tells_key}
    async with (
        scripted() as (engine,),
        gateway(folder, [engine], ext_proc=ext_proc, **known) as gate,
    ):
        yield gate, engine


async def test_without_a_key_nobody_is_let_in(tmp_path: Path, ext_proc: bool) -> None:
    async with guarded(tmp_path, ext_proc) as (gate, engine):
        refused = await soon(gate.router.post())

        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        assert refused.json()["error"]["type"] == "AuthenticationError"
        assert engine.idle


async def test_a_limit_holds_until_the_answer_has_ended(tmp_path: Path, ext_proc: bool) -> None:
    async with guarded(tmp_path, ext_proc) as (gate, engine):
        asked = gate.router.post(headers=SHOWN)
        exchange = await engine.next()

        refused = await soon(gate.router.post(headers=SHOWN))

        assert refused.status_code == 429
        assert "retry-after" in refused.headers
        await exchange.answer(b"{}")
        assert (await soon(asked)).status_code == 200
        await settled(gate)
        again = gate.router.post(headers=SHOWN)
        await (await engine.next()).answer(b"{}")
        assert (await soon(again)).status_code == 200
        await settled(gate)


@pytest.mark.parametrize(
    ("engine_key", "tells_key"),
    [(None, True), ("sk-engines-01234567", True), ("sk-engines-01234567", False)],
)
async def test_engines_see_their_own_key_alone(
    tmp_path: Path, ext_proc: bool, engine_key: str | None, tells_key: bool
) -> None:
    async with guarded(tmp_path, ext_proc, engine_key, tells_key) as (gate, engine):
        shown = f"Bearer {engine_key}" if engine_key and tells_key else None
        for path in ("/v1/completions", "/v1/embeddings"):
            asked = gate.router.post(path, headers=SHOWN)
            exchange = await engine.next()
            assert exchange.headers.get("authorization") == shown
            await exchange.answer(b"{}")
            await soon(asked)
            await settled(gate)


@pytest.mark.parametrize(
    "name", ["x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id"]
)
async def test_without_keys_the_gateway_names_the_tenant(
    tmp_path: Path, ext_proc: bool, name: str
) -> None:
    async with (
        scripted() as (engine,),
        gateway(tmp_path, [engine], ext_proc=ext_proc, slots=1) as gate,
    ):
        holding = gate.router.post()
        exchange = await engine.next()
        asked = gate.router.post(headers={name: "team"})
        pool = gate.router.dispatcher.deciders["default"].pool
        await until(lambda: dict(pool.requests_of) == {"team": 1})
        await exchange.answer(b"{}")
        await (await engine.next()).answer(b"{}")
        await soon(asyncio.gather(holding, asked))
        await settled(gate)
