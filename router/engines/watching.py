"""Asking many engines over HTTP, each at its own pace, for as long as it is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Generic, TypeVar

import httpx

from router.engines.upstream import bearer

E = TypeVar("E")


class Watches(Generic[E]):
    """A task for every engine, from its coming to its going.

    Args:
        watch: goes on for ever with one engine; the client is shared by all.
        what: is watched, for the tasks' names.
        timeout_s: the client's.
        key: the engines' API key; None: they ask for none.

    Attributes:
        engines: by URL.
    """

    def __init__(
        self,
        watch: Callable[[E, httpx.AsyncClient], Coroutine[None, None, None]],
        what: str,
        timeout_s: float,
        key: str | None = None,
    ) -> None:
        self.engines: dict[str, E] = {}
        self._watch = watch
        self._what = what
        self._client = partial(
            httpx.AsyncClient, timeout=timeout_s, headers=bearer(key), trust_env=False
        )
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._start: Callable[[str, E], None] = lambda url, engine: None

    async def run(self) -> None:
        """Watch until cancelled."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with (
            self._client(limits=limits) as client,
            asyncio.TaskGroup() as tasks,
        ):

            def start(url: str, engine: E) -> None:
                watching = self._watch(engine, client)
                self._tasks[url] = tasks.create_task(watching, name=f"{self._what} {url}")

            self._start = start
            for url, engine in self.engines.items():
                start(url, engine)
            await asyncio.Event().wait()

    def begin(self, url: str, engine: E) -> None:
        """One more engine."""
        self.engines[url] = engine
        self._start(url, engine)

    def end(self, url: str) -> None:
        """An engine is gone; nothing more is done about it, not even with an answer under way."""
        del self.engines[url]
        task = self._tasks.pop(url, None)
        if task is not None:
            task.cancel()
