"""Work for a client, for as long as there is one."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.types import Receive


async def client_left(receive: Receive) -> None:
    """Return when the client is gone, or has its whole answer; its body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancelled(task: asyncio.Task[None]) -> None:
    """Wait until it has ended; what it raised before is raised here."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
