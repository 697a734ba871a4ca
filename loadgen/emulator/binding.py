"""Binds the ZMQ endpoints of an emulated worker, which restarts at the same ones."""

import asyncio
import errno
from collections.abc import Callable
from typing import TypeVar

import zmq

from router.core.errors import ConfigError

_REBIND_WAIT_S = 0.02
_REBIND_TRIES = 100
_Bound = TypeVar("_Bound")


async def bound(bind: Callable[[], _Bound], problem: str) -> _Bound:
    """What ``bind`` returns, once the endpoint is free.

    ZMQ releases an endpoint some time after its socket was closed.

    Raises:
        ConfigError: it cannot be bound; ``problem`` begins the message.
    """
    tries = _REBIND_TRIES
    while True:
        try:
            return bind()
        except zmq.ZMQError as error:
            if not tries or error.errno != errno.EADDRINUSE:
                raise ConfigError(f"{problem} ({error.strerror})") from error
        tries -= 1
        await asyncio.sleep(_REBIND_WAIT_S)
