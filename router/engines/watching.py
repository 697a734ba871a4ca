"""Asking many engines over HTTP, each at its own pace, for as long as it is there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Generic, TypeVar

from router.engines.upstream import HttpClient
from router.errors import AnsweredError, UnknownPathError, UpstreamTimeoutError

_UNKNOWN = (404, 405, 501)

E = TypeVar("E")


class Watches(Generic[E]):
    """A task for every engine, from its coming to its going.

    Args:
        watch: goes on for ever with one engine.
        what: is watched, for the tasks' names.
        timeout_s: bound on one question.
        key: the engines' API key; None: they ask for none.

    Attributes:
        engines: by URL.
    """

    def __init__(
        self,
        watch: Callable[[E], Coroutine[None, None, None]],
        what: str,
        timeout_s: float,
        key: str | None = None,
    ) -> None:
        self.engines: dict[str, E] = {}
        self._watch = watch
        self._what = what
        self._timeout_s = timeout_s
        self._client = HttpClient(timeout_s, key)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._start: Callable[[str, E], None] = lambda url, engine: None

    async def run(self) -> None:
        """Watch until cancelled."""
        async with contextlib.aclosing(self._client), asyncio.TaskGroup() as tasks:

            def start(url: str, engine: E) -> None:
                self._tasks[url] = tasks.create_task(
                    self._watch(engine), name=f"{self._what} {url}"
                )

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

    async def ask(self, url: str, path: str) -> bytes:
        """The body of an engine's answer.

        Raises:
            UnknownPathError: it knows no such path.
            UpstreamError: there is none in time, or it is not one of success.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                with contextlib.closing(await self._client.request("GET", url, path)) as answer:
                    body = await answer.read()
        except TimeoutError:
            raise UpstreamTimeoutError(f"no answer within {self._timeout_s:g} s") from None
        if answer.status in _UNKNOWN:
            raise UnknownPathError(f"status {answer.status}")
        if not 200 <= answer.status < 300:
            raise AnsweredError(f"status {answer.status}")
        return body
