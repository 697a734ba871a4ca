"""A router before a prefill worker and a decode worker, both scripted."""

import asyncio
import json
from typing import Any

import httpx

from tests.support.scripted import Exchange, ScriptedServer, token_events
from tests.support.serving import Router

PARAMS = {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[3, 1]]}
TOKENS = token_events(5)
ANSWER = b'{"choices": [], "usage": {"prompt_tokens": 77, "total_tokens": 80}}'
Pair = tuple[Router, ScriptedServer, ScriptedServer]


async def computed(exchange: Exchange, prompt_tokens: int = 77, params: Any = PARAMS) -> None:
    """The answer of a prefill worker."""
    answer = {"usage": {"prompt_tokens": prompt_tokens}, "kv_transfer_params": params}
    await exchange.answer(json.dumps(answer).encode())


async def streaming(pair: Pair) -> tuple[asyncio.Task[httpx.Response], Exchange]:
    """A request whose prompt is computed, and whose stream has begun without an event."""
    router, prefill, decode = pair
    asked = router.post(stream=True)
    await computed(await prefill.next())
    exchange = await decode.next()
    await exchange.start_stream()
    return asked, exchange


def kept(router: Router, worker: str = "a") -> int:
    return int(router.dispatcher.cluster.worker(worker).kept_tokens)  # type: ignore[attr-defined]


def stats(router: Router) -> Any:
    return router.dispatcher.deciders["default/prefill"].stats
