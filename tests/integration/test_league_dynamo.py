"""Dynamo's selection service before emulated engines: whether their state reaches it."""

import json
import math
import random
from pathlib import Path

import httpx
import pytest

from loadgen.emulator.prompt_content import Content, whole_tokens
from tests.bench.league import dynamo, rendering
from tests.bench.league.entrant import Engines, Entrant, Running
from tests.bench.league.pins import PEERS
from tests.bench.league.prompts import Reader, token_ids
from tests.bench.league.relay import Asked
from tests.support.fleet import running_fleet
from tests.support.server import free_port, wait_until

WORKERS, BLOCK, BLOCKS, ASKED = 4, 16, 10, 2


def text(seed: int, tokens: int) -> str:
    return "".join(random.Random(seed).choices("abcdefgh ", k=4 * tokens))


def cached(http: httpx.Client, url: str, seed: int) -> int:
    """Ask for a prompt; as many of its tokens the engine had cached."""
    body = {"prompt": text(seed, BLOCKS * BLOCK + 1), "max_tokens": 4, "stream": True}
    body["stream_options"] = {"include_usage": True}
    answer = http.post(f"{url}/v1/completions", json=body).raise_for_status()
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert events.pop() == "[DONE]"
    usage = json.loads(events[-1])["usage"]
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))


def await_blocks(running: Running, blocks: int) -> None:
    """Until KV events have reached it."""
    wait_until(lambda: running.evidence()["index_blocks"] >= blocks, 30, f"{blocks} blocks")


def test_tokens_are_the_engines_own() -> None:
    reader = Reader("emulated")

    def ids(path: str, body: str) -> list[int] | None:
        parsed = reader.parsed(Asked(0, path, body.encode(), 0.0))
        return None if parsed is None else token_ids(parsed)

    plain = ids("/v1/completions", '{"prompt": "abcdefgh", "max_tokens": 3}')
    chat = ids("/v1/chat/completions", '{"messages": [{"role": "user", "content": "abcdefgh"}]}')
    assert plain is not None
    assert chat is not None
    assert len(plain) == 2
    assert chat[-2:] == plain
    assert plain == Content("abcdefgh").ids(0, 2)
    for prompt in ("a fair number of words", "zwölf Äpfel", text(1, 300)):
        parsed = reader.parsed(Asked(0, "", json.dumps({"prompt": prompt}).encode(), 0.0))
        assert parsed is not None
        tokens = Content(whole_tokens(prompt)).ids(0, math.ceil(len(prompt) / 4))
        assert token_ids(parsed) == tokens
    assert ids("/v1/completions", '{"prompt": [7, 8, 9]}') == [7, 8, 9]
    assert ids("/v1/completions", '{"prompt": []}') is None


# Slow, since Dynamo's service listens on all addresses: only who asks for it starts it.
@pytest.mark.slow
@pytest.mark.skipif(not PEERS["dynamo"].installed, reason="Dynamo's environment has not been built")
@pytest.mark.parametrize("entrant", dynamo.ENTRANTS, ids=lambda entrant: entrant.name)
def test_it_foretells_what_engines_have_cached(entrant: Entrant, tmp_path: Path) -> None:
    """A prompt that an engine has cached goes there, whichever engine that is."""
    events = free_port(WORKERS)
    flags = ["--workers", str(WORKERS), "--no-barrier", "--kv-events-port", str(events)]
    flags += ["--block-tokens", str(BLOCK), "--step-time", "1e-3,0"]
    # The league's own engines: their metrics all say the same rank, their events do not.
    with running_fleet(tmp_path, *flags, program=rendering.__name__) as fleet:
        first = fleet.server.port
        urls = [f"http://127.0.0.1:{first + rank}" for rank in range(WORKERS)]
        ports = range(events, events + WORKERS)
        engines = Engines(urls, fleet.workers, ports, 8, BLOCK, "emulated", 1.0)
        with entrant.start(engines, tmp_path) as running, httpx.Client(timeout=60) as http:
            assert len(running.pids()) >= 1
            for rank, url in enumerate(urls):
                assert cached(http, url, rank) == 0
                await_blocks(running, BLOCKS * (rank + 1))
            for _ in range(ASKED):
                for rank in range(WORKERS):
                    assert cached(http, running.url, rank) == BLOCKS * BLOCK
            wait_until(lambda: not running.evidence()["active_requests"], 30, "all have ended")
            told = running.evidence()
        assert told["compared_requests"] == told["relay_requests"] == ASKED * WORKERS
        assert told["foretold_tokens"] == told["cached_tokens"]
        assert told["cached_tokens"] == BLOCKS * BLOCK * ASKED * WORKERS
        assert told["not_told"] == 0
        assert told["index_blocks"] == BLOCKS * WORKERS
