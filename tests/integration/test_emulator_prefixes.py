"""What emulated engines tell of their prefix caches, as the plug-in does."""

import asyncio
from pathlib import Path

import httpx
import pytest

from loadgen.emulator.faults import Fault
from loadgen.engine.engine_features import EngineFeatures
from router.core.prefix.ids import block_ids, chain, seed
from tests.support.core import token
from tests.support.emulated import client, emulated, reading
from tests.support.prefix_view import PrefixView
from tests.support.server import free_port

CACHING = EngineFeatures(block_tokens=32)


async def complete(http: httpx.AsyncClient, number: int, prompt: object, **more: object) -> int:
    """Tokens of a prompt found in the cache."""
    body = {"prompt": prompt, "max_tokens": 3, "ignore_eos": True, **more}
    headers = {"X-Request-Id": token(number)}
    answer = await http.post("/v1/completions", json=body, headers=headers)
    answer.raise_for_status()
    details = answer.json()["usage"]["prompt_tokens_details"] or {}
    return int(details.get("cached_tokens", 0))


def own(prompt: list[int], salt: str = "", lora: str = "") -> bytes:
    return block_ids(chain(prompt, seed(lora, salt)), 32)


async def test_what_is_told_is_what_is_held(tmp_path: Path) -> None:
    """Also with KV events beside it, which read the same cache."""
    events = free_port()
    settings = {"features": CACHING, "kv_events_port": events, "kv_tokens": 320}
    async with (
        emulated(tmp_path, **settings) as fleet,
        client(fleet) as http,
        reading(fleet) as reader,
    ):
        cache = fleet.workers[0].model.engine.prefix_cache
        assert cache is not None
        view, sent, hits = PrefixView(), {}, 0
        full = await reader.full()
        assert (full.cache_block, full.blocks_stored) == (32, b"")

        async def catch_up(number: int) -> None:
            while True:
                last = await reader.next()
                if last.sequence > full.sequence:
                    view.apply(last)
                    assert last.cache_block == 32
                if any(token(number) in id_ for id_ in last.finished):
                    break

        for number in range(1, 13):
            prompt = [number // 2] * (70 + 9 * number)
            salt = "own" if number % 3 == 0 else ""
            ids = sent[number] = own(prompt, salt)
            # The last token is always computed.
            expected = 32 * min(view.leading(ids), (len(prompt) - 1) // 32)
            assert await complete(http, number, prompt, cache_salt=salt) == expected
            hits += expected > 0
            await catch_up(number)
            assert view.held == {*cache._cached}
        assert hits
        assert len(view.held) < sum(len(ids) // 8 for ids in sent.values())
        told = {id_: view.chain(id_) for id_ in view.chains}
        assert {
            number: next(ids for id_, ids in told.items() if token(number) in id_)
            for number in sent
        } == sent
        full = await reader.full()
        assert {*memoryview(full.blocks_stored).cast("Q")} == view.held

        assert (await http.post("/reset_prefix_cache")).status_code == 200
        while True:  # the heartbeat tells it, once
            last = await reader.next()
            view.apply(last)
            if last.blocks_cleared:
                break
        assert view.held == set()
        assert not (await reader.next()).blocks_cleared


async def test_a_text_has_ids_of_its_own(tmp_path: Path) -> None:
    async with (
        emulated(tmp_path, features=CACHING) as fleet,
        client(fleet) as http,
        reading(fleet) as reader,
    ):
        text = "which step is even? " * 20
        first = asyncio.ensure_future(complete(http, 1, text))
        chains: dict[str, bytes] = {}
        while len(chains) < 2:
            for one in (await reader.next()).chains:
                chains[one.id] = one.blocks
                if len(chains) == 1:
                    assert await first == 0
                    second = asyncio.ensure_future(complete(http, 2, text + "and odd?"))
        assert await second == 96
        prompt, longer = chains.values()
        assert len(prompt) == 3 * 8
        assert longer == prompt


async def test_a_restarted_engine_holds_nothing(tmp_path: Path) -> None:
    async with emulated(tmp_path, features=CACHING) as fleet:
        async with client(fleet) as http, reading(fleet) as reader:
            await complete(http, 1, [1] * 64)
            assert (await reader.full()).blocks_stored == own([1] * 64)
        await fleet.inject(0, Fault("kill"))
        await fleet.restore(0)
        async with reading(fleet) as reader:
            full = await reader.full()
            assert (full.cache_block, full.blocks_stored) == (32, b"")


@pytest.mark.parametrize(
    "features", [EngineFeatures(block_tokens=24), EngineFeatures(prefix_caching=False)]
)
async def test_what_has_no_ids_is_not_told(tmp_path: Path, features: EngineFeatures) -> None:
    async with (
        emulated(tmp_path, features=features) as fleet,
        client(fleet) as http,
        reading(fleet) as reader,
    ):
        await complete(http, 1, [1] * 64)
        last = await reader.full()
        assert (last.cache_block, last.blocks_stored) == (0, b"")
