import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from router.core.errors import AnsweredError, UnknownPathError, UpstreamTimeoutError
from router.core.types import WorkerSpec
from router.engines.http_client import HttpClient
from router.engines.time_limit import time_limit

_UNKNOWN = (404, 405, 501)


@dataclass(slots=True)
class PolledEngine:
    """One URL and the workers behind it."""

    url: str
    workers: list[WorkerSpec] = field(default_factory=list)


E = TypeVar("E", bound=PolledEngine)


class Poller(Generic[E]):
    """Polls engines over HTTP, each in its own task until its last worker has left.

    Engines are known by URL, and by the ids of their workers (``_of``). ``make``: one of a URL.
    """

    make: Callable[[str], E]

    def __init__(
        self, specs: Iterable[WorkerSpec], timeout_s: float, key: str | None = None
    ) -> None:
        self._engines: dict[str, E] = {}
        self._of: dict[str, E] = {}
        self._timeout_s = timeout_s
        self._client = HttpClient(timeout_s, key)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._start: Callable[[str, E], None] = lambda url, engine: None
        for spec in specs:
            self.join(spec)

    async def _watch(self, engine: E) -> None:
        """Poll it for ever."""
        raise NotImplementedError

    async def run(self) -> None:
        async with contextlib.aclosing(self._client), asyncio.TaskGroup() as tasks:

            def start(url: str, engine: E) -> None:
                name = f"{type(self).__name__} {url}"
                self._tasks[url] = tasks.create_task(self._watch(engine), name=name)

            self._start = start
            for url, engine in self._engines.items():
                start(url, engine)
            await asyncio.Event().wait()

    def join(self, spec: WorkerSpec) -> None:
        engine = self._engines.get(spec.url)
        if engine is None:
            engine = self._engines[spec.url] = self.make(spec.url)
            self._start(spec.url, engine)
        engine.workers.append(spec)
        self._of[spec.id] = engine

    def leave(self, worker_id: str) -> None:
        engine = self._of.pop(worker_id)
        engine.workers = [spec for spec in engine.workers if spec.id != worker_id]
        if not engine.workers:
            del self._engines[engine.url]
            if (task := self._tasks.pop(engine.url, None)) is not None:
                task.cancel()

    async def _ask(self, url: str, path: str) -> bytes:
        """An engine's answer; UpstreamError: none in time, no success, or an unknown path."""
        try:
            async with time_limit(self._timeout_s):
                with contextlib.closing(await self._client.request("GET", url, path)) as answer:
                    body = await answer.read()
        except TimeoutError:
            raise UpstreamTimeoutError(f"no answer within {self._timeout_s:g} s") from None
        if answer.status in _UNKNOWN:
            raise UnknownPathError(f"status {answer.status}")
        if not 200 <= answer.status < 300:
            raise AnsweredError(f"status {answer.status}")
        return body
