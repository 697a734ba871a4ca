"""What a real vLLM without the plug-in finds in its cache, beside what its KV events foretell."""

import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import pytest

from router.core.prefix.ids import chain, seed
from router.core.prefix.prefixes import Prefixes
from router.core.types import Content, Request, WorkerSpec
from router.engines.kv_event_reader import KvEventReader
from router.engines.zmq_reader import SocketReader
from tests.support.core import token
from tests.support.emulated import eventually
from tests.support.engine import MODEL, Installation, running_engine
from tests.support.server import free_port

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

BLOCKS, BLOCK_TOKENS = 24, 32
FLAGS = (
    *(
        "--num-gpu-blocks-override",
        str(BLOCKS + 1),
        "--max-num-seqs",
        "8",
        "--block-size",
        str(BLOCK_TOKENS),
    ),
    *("--max-model-len", "512", "--max-num-batched-tokens", "128", "--enable-prefix-caching"),
    "--enable-prompt-tokens-details",
)


@asynccontextmanager
async def reading(spec: WorkerSpec, prefixes: Prefixes) -> AsyncIterator[KvEventReader]:
    sockets = SocketReader(time.monotonic, lambda: True)
    reader = KvEventReader(
        [spec],
        lambda told: prefixes.heard(told.worker_id, told.cache, told.received_s),
        prefixes.tells,
        time.monotonic,
        sockets,
    )
    sockets.start()
    reader.start()
    try:
        yield reader
    finally:
        sockets.close()
        reader.close()


async def test_hits_are_foretold_by_events_alone(
    engine_installation: Installation, tmp_path: Path
) -> None:
    """Also by a router that comes later and asks for what it missed."""
    port = free_port(2)
    replay = port + 1
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{port}",
        "replay_endpoint": f"tcp://*:{replay}",
    }
    flags = (*FLAGS, "--kv-events-config", json.dumps(config))
    with running_engine(engine_installation, tmp_path, *flags) as server:
        spec = WorkerSpec(
            "a",
            server.url,
            kv_events=f"tcp://127.0.0.1:{port}",
            kv_replay=f"tcp://127.0.0.1:{replay}",
        )
        rng = random.Random(1)
        prompts = [[rng.randrange(3, 200) for _ in range(200)] for _ in range(5)]
        early, found = Prefixes(), []
        async with reading(spec, early) as reader, httpx.AsyncClient(timeout=60) as http:
            for number in range(1, 25):
                prompt = rng.choice(prompts)[: rng.randrange(40, 200)]
                salt = "own" if number % 4 == 0 else ""
                pieces = chain(prompt, seed("", salt))
                request = Request(token(number), "g", len(prompt), content=Content(pieces=pieces))
                foretold = early.hits(request, ("a",))[0] if early.told else 0
                # The answer's last step fills a block: nothing is told after that.
                body = {
                    "model": MODEL,
                    "prompt": prompt,
                    "max_tokens": 40 + -(len(prompt) + 39) % BLOCK_TOKENS,
                    "ignore_eos": True,
                    "return_token_ids": True,
                }
                answer = await http.post(
                    f"{server.url}/v1/completions",
                    json={**body, **({"cache_salt": salt} if salt else {})},
                )
                answer.raise_for_status()
                details = answer.json()["usage"]["prompt_tokens_details"] or {}
                found.append(int(details.get("cached_tokens") or 0))
                assert foretold == found[-1]
                # The last token is not kept.
                kept = prompt + answer.json()["choices"][0]["token_ids"][:-1]
                pieces = chain(kept, seed("", salt))
                whole = Request("whole", "g", len(kept) + 1, content=Content(pieces=pieces))
                await eventually(partial(has, early, whole), "its last block is told")
            assert reader.broken == 0
        assert min(sum(map(bool, found)), found.count(0)) > 3
        late, probe = Prefixes(), replace(request, id=token(99))

        def same() -> bool:
            late.forget(probe.id)
            return late.told and late.hits(probe, ("a",)) == early.hits(probe, ("a",))

        assert early.hits(probe, ("a",))[0] > 0
        async with reading(spec, late):
            await eventually(same, "what was missed is told")
            await eventually(lambda: late.held("a") == early.held("a"), "all of it")


def has(prefixes: Prefixes, whole: Request) -> bool:
    """Whether all its full blocks are cached; those before its last token."""
    prefixes.forget(whole.id)
    full = (whole.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    return prefixes.told and prefixes.hits(whole, ("a",))[0] == full
