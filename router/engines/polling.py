from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Generic, TypeVar

from router.core.errors import AnsweredError, UnknownPathError, UpstreamTimeoutError
from router.engines.http_client import HttpClient

_UNKNOWN = (404, 405, 501)

E = TypeVar("E")


class Watches(Generic[E]):
    """Polls engines over HTTP, each in its own task until it is removed.

    ``watch``: endless coroutine for one engine. ``what``: subject, for the tasks' names.
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
        self.engines[url] = engine
        self._start(url, engine)

    def end(self, url: str) -> None:
        del self.engines[url]
        task = self._tasks.pop(url, None)
        if task is not None:
            task.cancel()

    async def ask(self, url: str, path: str) -> bytes:
        """An engine's answer.

        Raises:
            UnknownPathError: the path is unsupported.
            UpstreamError: no answer in time, or no success.
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
