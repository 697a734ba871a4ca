"""Workers that were found join the running router, and those that are found no more leave it."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from router.core.errors import ConfigError
from router.core.types import WorkerSpec
from router.discovery.sources import Source

log = logging.getLogger(__name__)


class Found:
    """The last set of each source.

    ``change`` is called when one has changed; a ConfigError rejects the change.
    """

    def __init__(self, sources: Sequence[Source], change: Callable[[], None]) -> None:
        self._sources = sources
        self._change = change
        self._sets: list[Sequence[WorkerSpec]] = [()] * len(sources)
        self.changes = 0

    @property
    def workers(self) -> list[WorkerSpec]:
        return [spec for found in self._sets for spec in found]

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(len(self._sources)):
                tasks.create_task(self._follow(number))

    async def _follow(self, number: int) -> None:
        async for found in self._sources[number].sets():
            before, self._sets[number] = self._sets[number], found
            try:
                self._change()
            except ConfigError as error:
                log.error("the workers stay as they are: %s", error)  # noqa: TRY400 - says it all
                self._sets[number] = before
            self.changes += 1
