"""Prompts that a real vLLM has offloaded: what it finds, computes and tells of them.

vLLM copies between a GPU and the memory of its host; here the copies are those of tests/support.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import zmq

from router.core.prefix.ids import block_ids, chain, seed
from router.core.prefix.kv_events import KvEventStream, decode_events
from router.core.prefix.prefixes import Prefixes
from router.core.types import Content, Request
from tests.support.core import token
from tests.support.engine import MODEL, Installation, metric
from tests.support.engine_watch import WAIT_S, Watched, watching
from tests.support.prefix_view import PrefixView
from tests.support.server import free_port, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

BLOCKS, BLOCK_TOKENS = 24, 32
FLAGS = (
    *("--scheduler-cls", "engine_patches.scheduler.EvenstepScheduler"),
    *("--num-gpu-blocks-override", str(BLOCKS + 1), "--max-num-seqs", "8"),
    *("--max-model-len", "512", "--max-num-batched-tokens", "128", "--enable-prefix-caching"),
    "--enable-prompt-tokens-details",
)
# Room for 32 blocks of the tiny model (2 layers, a KV head of 32, bfloat16): some are evicted.
CPU_BYTES = 32 * BLOCK_TOKENS * 2 * 2 * 32 * 2


class Events:
    """What an engine's KV events tell, read as they are needed."""

    def __init__(self, port: int) -> None:
        self.prefixes = Prefixes(10_000)
        self._stream = KvEventStream(repeats=False)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(f"tcp://127.0.0.1:{port}")

    def held(self) -> int | None:
        while self._socket.poll(0):
            _, number, batch = self._socket.recv_multipart()
            events = decode_events(batch)
            for told in self._stream.published(int.from_bytes(number, "big"), events):
                self.prefixes.heard("a", told, 0.0)
        return self.prefixes.held("a")

    def hits(self, tokens: int, pieces: bytes) -> int:
        request = Request(token(1), "g", tokens, content=Content(pieces=pieces))
        self.prefixes.forget(request.id)
        return self.prefixes.hits(request, ("a",))[0]

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()


@pytest.fixture
def engine(engine_installation: Installation, tmp_path: Path) -> Iterator[tuple[Watched, Events]]:
    port = free_port()
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}"}
    spec = {"spec_name": "Spec", "spec_module_path": "tests.support.cpu_offload"}
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": CPU_BYTES, **spec},
    }
    flags = (
        *("--kv-transfer-config", json.dumps(transfer)),
        *("--kv-events-config", json.dumps(events)),
    )
    told = Events(port)
    with watching(engine_installation, tmp_path, *FLAGS, *flags) as watched:
        yield watched, told
    told.close()


def test_what_is_offloaded_is_foretold(engine: tuple[Watched, Events]) -> None:
    watched, events = engine
    rng, view, seen = random.Random(2), PrefixView(), 0
    prompts = [[rng.randrange(3, 200) for _ in range(rng.randrange(100, 250))] for _ in range(8)]
    found, loaded, computed, asked = [], 0, 0, 0
    for number in range(1, 41):
        prompt = rng.choice(prompts)[: rng.randrange(60, 250)]
        if not len(prompt) % BLOCK_TOKENS:
            prompt.pop()  # of whole blocks vLLM loads the last too, and computes one token again
        salt = "own" if number % 5 == 0 else ""
        pieces = chain(prompt, seed("", salt))
        foretold = view.leading(block_ids(pieces, BLOCK_TOKENS)) * BLOCK_TOKENS
        if number > 1:
            assert events.hits(len(prompt), pieces) == foretold
        before = external(watched)
        cached = complete(watched, number, prompt, salt)
        loaded += external(watched) - before
        found.append(cached)
        asked += len(prompt)
        messages = [*watched.stream.snapshots]
        for one in messages[seen:]:
            view.apply(one)
            computed += one.scheduled_prefill_tokens
        seen = len(messages)
        assert cached == foretold, f"request {number}"
        wait_until(lambda: events.held() == len(view.held), WAIT_S, "both tell the same")
    # What was loaded was not computed, and not counted as that.
    assert computed == asked - sum(found)
    assert loaded > 10 * BLOCK_TOKENS
    assert min(sum(map(bool, found)), found.count(0)) > 3
    assert len(view.held) > BLOCKS


def external(watched: Watched) -> int:
    """Prompt tokens that were loaded so far, by vLLM's own count."""
    return int(metric(watched.server, "vllm:external_prefix_cache_hits_total"))


def complete(watched: Watched, number: int, prompt: list[int], salt: str) -> int:
    """Tokens of a prompt that vLLM found; waits until the end has been told."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 40, "ignore_eos": True}
    answer = httpx.post(
        f"{watched.server.url}/v1/completions",
        json={**body, **({"cache_salt": salt} if salt else {})},
        headers={"X-Request-Id": token(number)},
        timeout=WAIT_S,
    )
    answer.raise_for_status()
    stream = watched.stream
    wait_until(
        lambda: any(token(number) in id_ for one in [*stream.snapshots] for id_ in one.finished),
        WAIT_S,
        "the end is told",
    )
    details = answer.json()["usage"]["prompt_tokens_details"] or {}
    return int(details.get("cached_tokens") or 0)
