from __future__ import annotations

import asyncio
import contextlib

from starlette.types import Receive


async def client_left(receive: Receive) -> None:
    """Return when the client has left or has its whole answer; its body was read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancelled(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait for its end; an earlier error of the task is raised here."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
