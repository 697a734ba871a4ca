"""The error tree; HTTP codes are given only where HTTP is spoken (``app.py``, ``proxy/``).

EvenstepError
├── ConfigError            settings, command line
├── InputError             a file or a value that the user gave
├── RequestError           a client's request that cannot be served as it stands
│   ├── InvalidRequestError
│   └── UnknownModelError
├── PoolFullError          no room to wait
├── QueueTimeoutError      waited longer than allowed
├── NoWorkerError          no live worker in the group
├── PolicyError            a policy broke its contract
├── SnapshotError          a state message that cannot be understood
└── UpstreamError          the engine could not be reached, or broke off
    └── RecalledError      the router broke it off
"""

from __future__ import annotations


class EvenstepError(Exception):
    """Base of every error that Evenstep raises on purpose."""


class ConfigError(EvenstepError):
    """Settings that cannot be used; the message names the setting and the mend."""


class InputError(EvenstepError):
    """A file or value that cannot be used; the message names the place and the mend."""


class RequestError(EvenstepError):
    """A client's request that cannot be served as it stands.

    Args:
        message: for the client.
        param: the offending field, if one can be named.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequestError(RequestError):
    """Not JSON, or not the shape that a completion request has."""


class UnknownModelError(RequestError):
    """No group serves the model."""


class PoolFullError(EvenstepError):
    """The waiting pool has no room.

    Args:
        limit: requests that may wait.
        retry_after_s: how long the client should wait before it tries again.
    """

    def __init__(self, limit: int, retry_after_s: int) -> None:
        super().__init__(f"the waiting pool is full ({limit} requests); retry later")
        self.retry_after_s = retry_after_s


class QueueTimeoutError(EvenstepError):
    """The request waited in the pool longer than the queue timeout."""


class NoWorkerError(EvenstepError):
    """No live worker serves the group."""


class PolicyError(EvenstepError):
    """A policy returned assignments that break its contract."""


class SnapshotError(EvenstepError):
    """A state message that cannot be understood."""


class UpstreamError(EvenstepError):
    """The engine could not be reached, or its answer broke off or is not HTTP."""


class RecalledError(UpstreamError):
    """The router gave up an attempt, since its worker is out of use."""
