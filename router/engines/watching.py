"""Asking many engines over HTTP, each at its own pace."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import TypeVar

import httpx

E = TypeVar("E")


async def watch_all(
    engines: Mapping[str, E],
    watch: Callable[[E, httpx.AsyncClient], Coroutine[None, None, None]],
    what: str,
    timeout_s: float,
) -> None:
    """Watch every engine in a task of its own, until cancelled.

    Args:
        engines: by URL.
        watch: goes on for ever with one engine; the client is shared by all.
        what: is watched, for the tasks' names.
        timeout_s: the client's.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with (
        httpx.AsyncClient(timeout=timeout_s, limits=limits, trust_env=False) as client,
        asyncio.TaskGroup() as tasks,
    ):
        for url, engine in engines.items():
            tasks.create_task(watch(engine, client), name=f"{what} {url}")
