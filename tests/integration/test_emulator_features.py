"""Prefix caching, KV events, drafts and windows of emulated engines, seen from outside."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import httpx
import msgspec
import zmq
import zmq.asyncio

from loadgen.emulator.faults import Fault
from loadgen.engine.engine_features import EngineFeatures, Window
from loadgen.engine.prefill_settings import PrefillSettings
from router.core.step_time import StepTime
from router.core.types import RunningRequest
from tests.support.emulated import TIMEOUT_S, client, emulated, eventually, reading
from tests.support.server import free_port

CACHING = EngineFeatures(block_tokens=4)
CHAT = [
    {"role": "system", "content": "Answer in one word. " * 10},
    {"role": "user", "content": "Which step is even?"},
]


async def complete(http: httpx.AsyncClient, prompt: list[int], **more: object) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 3, "ignore_eos": True, **more}
    answer = await http.post("/v1/completions", json=body)
    answer.raise_for_status()
    usage: dict[str, Any] = answer.json()["usage"]
    return usage


def cached(usage: dict[str, Any]) -> int:
    found: int = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
    return found


async def test_a_prompt_seen_before_is_found_and_told(tmp_path: Path) -> None:
    prefill = PrefillSettings(chunk=512)
    time = StepTime(1e-3, 0.0, 0.0, 1e-6)
    async with (
        emulated(tmp_path, features=CACHING, prefill=prefill, step_time=time) as fleet,
        client(fleet) as http,
        reading(fleet) as reader,
    ):
        prompt = list(range(21))
        assert cached(await complete(http, prompt)) == 0
        assert cached(await complete(http, prompt)) == 20
        assert cached(await complete(http, prompt[:20])) == 16
        assert cached(await complete(http, [*prompt[:9], *prompt])) == 8
        assert cached(await complete(http, prompt, cache_salt="own")) == 0
        rows: list[RunningRequest] = []
        computed = 0
        while len(rows) < 5:
            snapshot = await reader.next()
            computed += snapshot.scheduled_prefill_tokens
            rows += [row for row in snapshot.running if row.generated_tokens == 1]
        assert [row.cached_tokens for row in rows] == [0, 20, 16, 8, 0]
        assert computed == sum(row.prompt_tokens - row.cached_tokens for row in rows)
        text = (await http.get("/metrics")).text
        labels = '{engine="0",model_name="emulated"}'
        assert f"vllm:prefix_cache_hits_total{labels} 44.0" in text
        assert f"vllm:prefix_cache_queries_total{labels} {21 * 3 + 20 + 30}.0" in text
        assert 'block_size="4",enable_prefix_caching="True"' in text
        workers: Any = fleet.describe()["workers"]
        assert workers[0]["prefix_cache"]["hit_tokens"] == 44


async def test_every_form_of_answer_tells_cached_tokens(tmp_path: Path) -> None:
    async with emulated(tmp_path, features=CACHING) as fleet, client(fleet) as http:
        ask = {"model": "emulated", "messages": CHAT, "max_tokens": 2}
        first = (await http.post("/v1/chat/completions", json=ask)).json()["usage"]
        assert cached(first) == 0
        again = (await http.post("/v1/chat/completions", json=ask)).json()["usage"]
        tokens = first["prompt_tokens"]
        found = (tokens - 1) // 4 * 4
        assert cached(again) == found
        streamed = await http.post(
            "/v1/chat/completions",
            json={**ask, "stream": True, "stream_options": {"include_usage": True}},
        )
        last = msgspec.json.decode(streamed.text.split("\n\n")[-3].removeprefix("data: "))
        assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": found}
        message = (await http.post("/v1/messages", json=ask)).json()["usage"]
        assert message["cache_read_input_tokens"] == found
        assert message["input_tokens"] == tokens - found
        response = await http.post("/v1/responses", json={"input": CHAT, "max_output_tokens": 2})
        assert response.json()["usage"]["input_tokens_details"] == {"cached_tokens": found}
        other = [CHAT[0], {"role": "user", "content": "Another question"}]
        shared = (await http.post("/v1/chat/completions", json={**ask, "messages": other})).json()
        # The system's message and four tokens of the next one's head are alike, in whole blocks.
        assert cached(shared["usage"]) == (4 + 50 + 4) // 4 * 4


class Events:
    """A subscriber of one worker's KV events."""

    def __init__(self, port: int) -> None:
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        self.socket.setsockopt(zmq.RECONNECT_IVL, 10)
        self.socket.connect(f"tcp://127.0.0.1:{port}")

    async def next(self) -> tuple[int, list[dict[str, Any]]]:
        topic, number, body = await asyncio.wait_for(self.socket.recv_multipart(), TIMEOUT_S)
        time_s, events, rank = msgspec.msgpack.decode(body)
        assert (topic, rank) == (b"", 0)
        assert time_s > 0
        return int.from_bytes(number, "big"), events


async def heard(
    events: Events, http: httpx.AsyncClient, below: float = math.inf, tries: int = 10_000
) -> None:
    """Send new prompts until an event with a number below this arrives.

    Those before the connection are lost; those of the engine's last life may come first.
    """

    async def arrives() -> None:
        while (await events.next())[0] >= below:
            pass

    seen = asyncio.ensure_future(arrives())
    prompt = 0
    while not seen.done():
        prompt -= 1
        assert prompt > -tries, "its number is never below"
        await complete(http, [prompt] * 4)
    await seen


@asynccontextmanager
async def listening(port: int, http: httpx.AsyncClient) -> AsyncIterator[Events]:
    """A subscriber that has certainly been connected: it has seen an event."""
    events = Events(port)
    try:
        await heard(events, http)
        yield events
    finally:
        events.context.destroy(linger=0)


async def test_kv_events_are_vllm_s(tmp_path: Path) -> None:
    port = free_port()
    async with (
        emulated(tmp_path, features=CACHING, kv_events_port=port, kv_tokens=80) as fleet,
        client(fleet) as http,
        listening(port, http) as events,
    ):
        prompt = list(range(13))
        await complete(http, prompt)
        await complete(http, [*prompt, *range(20, 28)])
        stored: list[dict[str, Any]] = []
        while len(stored) < 2:
            _, batch = await events.next()
            stored += [event for event in batch if event.get("token_ids", [-1])[0] >= 0]
        first, second = stored
        assert first["type"] == "BlockStored"
        assert (first["parent_block_hash"], first["token_ids"]) == (None, prompt[:12])
        assert second["parent_block_hash"] == first["block_hashes"][-1]
        assert second["token_ids"] == [12, *range(20, 27)]
        assert (second["block_size"], second["medium"], second["group_idx"]) == (4, "GPU", 0)
        assert {"lora_id", "lora_name"} <= second.keys()
        hashes = set(first["block_hashes"] + second["block_hashes"])
        assert len(hashes) == 5
        # A prompt that needs all memory evicts them.
        await complete(http, list(range(100, 176)))
        while hashes:
            _, batch = await events.next()
            for event in batch:
                if event["type"] == "BlockRemoved":
                    hashes -= set(event["block_hashes"])
        assert (await http.post("/reset_prefix_cache")).status_code == 200
        while True:
            number, batch = await events.next()
            if batch == [{"type": "AllBlocksCleared"}]:
                break
        assert number > 0
        assert fleet.workers[0].model.engine.used_tokens == 0
        assert cached(await complete(http, prompt)) == 0
        while number < 100:
            last = [200 + number] * 12
            await complete(http, last)
            number, _ = await events.next()
        assert cached(await complete(http, last)) == 8
        # A restarted engine is empty, and counts from 0 again; what is lost meanwhile is less.
        await fleet.inject(0, Fault("kill"))
        await fleet.restore(0)
        async with client(fleet) as again:
            assert cached(await complete(again, last)) == 0
            await heard(events, again, below=number)


async def test_memory_in_use_keeps_the_cache(tmp_path: Path) -> None:
    async with emulated(tmp_path, features=CACHING) as fleet, client(fleet) as http:
        engine = fleet.workers[0].model.engine
        call = asyncio.ensure_future(complete(http, list(range(40)), max_tokens=5000))
        await eventually(lambda: bool(engine.running), "it runs")
        await http.post("/reset_prefix_cache")
        assert engine.hit_tokens(engine.running[0].chain, 41) == 40
        call.cancel()


async def test_drafts_bring_several_tokens_a_step_to_the_client(tmp_path: Path) -> None:
    features = EngineFeatures(acceptance=(1.0, 1.0))
    async with emulated(tmp_path, features=features) as fleet, client(fleet) as http:
        usage = await complete(http, [1] * 5, max_tokens=31)
        assert usage["completion_tokens"] == 31
        assert fleet.workers[0].model.engine.generated_total == 31
        # The prompt's step brings one token, each of the others three.
        assert fleet.describe()["steps"] == 11


async def test_a_window_has_kv_groups_of_its_own(tmp_path: Path) -> None:
    features = EngineFeatures(block_tokens=4, window=Window(8, Fraction(2, 3)))
    async with (
        emulated(tmp_path, features=features, kv_tokens=40_000) as fleet,
        client(fleet) as http,
    ):
        engine = fleet.workers[0].model.engine
        call = asyncio.ensure_future(complete(http, [1] * 100, max_tokens=30_000))
        await eventually(lambda: bool(engine.running), "it runs")
        async with reading(fleet) as reader, asyncio.timeout(TIMEOUT_S):
            while not (snapshot := await reader.full()).running:
                pass
        full, *sliding = snapshot.kv_groups
        assert [(group.kind, group.window) for group in sliding] == [("sliding", 8)] * 2
        assert full.blocks_total == 30_000
        assert snapshot.admissible_blocks == 30_000 - full.blocks_used
        (row,) = snapshot.running
        assert full.blocks_used == engine.layers.blocks(row.prompt_tokens + row.generated_tokens)
        call.cancel()
