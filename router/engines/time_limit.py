import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

# Turns of the event loop from the arrival of bytes to the end of what waits for them, amply.
_TURNS = 8


@asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[None]:
    """As ``asyncio.timeout``, but what has come in time counts even if this process is late."""
    loop = asyncio.get_running_loop()
    timer: asyncio.Handle

    def strike(turns: int) -> None:
        nonlocal timer
        if turns:
            timer = loop.call_soon(strike, turns - 1)
        else:
            limit.reschedule(loop.time())

    async with asyncio.timeout(None) as limit:
        timer = loop.call_later(seconds, strike, _TURNS)
        try:
            yield
        finally:
            timer.cancel()
