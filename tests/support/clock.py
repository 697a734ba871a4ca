"""The event loop's clock: a test puts it forward instead of waiting."""

import asyncio


def put_forward(seconds: float) -> None:
    """Let what runs in this loop find that so much more time has passed.

    Timers that are due by then fire in the loop's next turn. What reads another clock is not moved.
    """
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds  # type: ignore[method-assign]
