"""What the plug-in tells of a real vLLM's prefix cache, beside what vLLM finds in it."""

import random
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.core.prefix.ids import block_ids, chain, seed
from tests.support.core import token
from tests.support.engine import MODEL, Installation
from tests.support.engine_watch import WAIT_S, Watched, watching
from tests.support.plugin_stream import Routers, ask_full
from tests.support.prefix_view import PrefixView
from tests.support.server import wait_until
from tests.support.told_hits import noted, running_noting

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

BLOCKS = 24
BLOCK_TOKENS = 32
FLAGS = (
    *("--scheduler-cls", "engine_patches.scheduler.EvenstepScheduler"),
    *("--num-gpu-blocks-override", str(BLOCKS + 1), "--max-num-seqs", "8"),
    *("--max-model-len", "512", "--max-num-batched-tokens", "128", "--enable-prefix-caching"),
    "--enable-prompt-tokens-details",
)


@pytest.fixture(scope="module")
def watched(
    engine_installation: Installation, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Watched]:
    with watching(engine_installation, tmp_path_factory.mktemp("prefixes"), *FLAGS) as watched:
        yield watched


def complete(watched: Watched, number: int, prompt: list[int], **more: object) -> tuple[int, int]:
    """Tokens of a prompt that vLLM found in its cache; waits until the end has been told.

    Returns:
        They and the number of messages so far.
    """
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 40, "ignore_eos": True, **more}
    headers = {"X-Request-Id": token(number)}
    url = f"{watched.server.url}/v1/completions"
    answer = httpx.post(url, json=body, headers=headers, timeout=WAIT_S)
    answer.raise_for_status()
    messages = watched.stream.snapshots
    wait_until(
        lambda: any(token(number) in id_ for one in [*messages] for id_ in one.finished),
        WAIT_S,
        "the end is told",
    )
    details = answer.json()["usage"]["prompt_tokens_details"] or {}
    return int(details.get("cached_tokens") or 0), len(messages)


def test_what_is_told_is_what_vllm_finds(watched: Watched, routers: Routers) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 200) for _ in range(rng.randrange(60, 200))] for _ in range(6)]
    seen, view = 0, PrefixView()
    hits, evicted = [], 0
    for number in range(1, 31):
        prompt = rng.choice(prompts)[: rng.randrange(40, 200)]
        salt = "own" if number % 5 == 0 else ""
        ids = block_ids(chain(prompt, seed("", salt)), BLOCK_TOKENS)
        # vLLM always computes the last token.
        blocks = min(view.leading(ids), (len(prompt) - 1) // BLOCK_TOKENS)
        more = {"cache_salt": salt} if salt else {}
        cached, messages = complete(watched, number, prompt, **more)
        for one in watched.stream.snapshots[seen:messages]:
            view.apply(one)
            assert one.cache_block == BLOCK_TOKENS
            evicted += len(one.blocks_removed) // 8
        seen = messages
        assert cached == blocks * BLOCK_TOKENS
        hits.append(cached)
        told = next(view.chain(id_) for id_ in view.chains if token(number) in id_)
        assert told[: len(ids)] == ids
        # The answer's last token is never computed.
        assert len(told) // 8 == (len(prompt) + 39) // BLOCK_TOKENS
        assert len(view.held) <= BLOCKS
    assert min(sum(map(bool, hits)), evicted, hits.count(0)) > 3

    full = ask_full(routers.asker(watched.endpoint))
    wait_until(
        lambda: watched.stream.snapshots[-1].sequence >= full.sequence, WAIT_S, "it is caught up"
    )
    for one in watched.stream.snapshots[seen:]:
        assert not one.blocks_stored + one.blocks_removed  # heartbeats repeat nothing
    assert {*array("Q", full.blocks_stored)} == view.held
    assert (full.blocks_removed, full.chains, full.cache_block) == (b"", (), BLOCK_TOKENS)


CHAT = [
    {"role": "system", "content": "Answer in one word."},
    {"role": "user", "content": "Which colour has the sky? " * 6},
]
ASKED = 4


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_who_asks_again_is_served_from_the_cache(
    watched: Watched, tmp_path: Path, path: str
) -> None:
    """One idle client, through the router; of token ids it foretells what vLLM finds."""
    what = {"messages": CHAT} if path.startswith("chat") else {"prompt": [7, *range(3, 190)]}
    body = {"model": MODEL, "max_tokens": 4, "temperature": 0, **what}
    worker = f"{watched.server.url},snapshots={watched.endpoint}"
    file = tmp_path / "hits"
    with running_noting(tmp_path, file, "--worker", worker) as router:
        usages = [asked(f"{router.url}/v1/{path}", body) for _ in range(ASKED)]
        wait_until(lambda: len(noted(file)) == ASKED, WAIT_S, "all were compared")
    found = [int((usage["prompt_tokens_details"] or {})["cached_tokens"] or 0) for usage in usages]
    whole = (usages[0]["prompt_tokens"] - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert whole > 3 * BLOCK_TOKENS
    assert found == [0, whole, whole, whole]
    told = [row[1:] for row in noted(file)]
    if path == "completions":
        assert told == [(each, each) for each in found]
    else:  # the length of a text is an estimate
        assert [min(pair) > 0 for pair in told] == [False, True, True, True]


def asked(url: str, body: object) -> Any:
    """What a request has used."""
    answer = httpx.post(url, json=body, timeout=WAIT_S)
    answer.raise_for_status()
    return answer.json()["usage"]
