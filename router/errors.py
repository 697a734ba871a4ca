"""The error tree; HTTP codes are given only where HTTP is spoken (``app.py``, ``proxy/``).

EvenstepError
├── ConfigError            settings, command line
├── InputError             a file or a value that the user gave
│   └── PlacementError     servers that cannot hold the model
├── RequestError           a client's request that cannot be served as it stands
│   ├── InvalidRequestError
│   └── UnknownModelError
├── UnknownKeyError        no API key, or one that does not count
├── KeyLimitError          a key has reached its limit
├── PoolFullError          no room to wait
│   └── DisplacedError     none any more
├── DeadlineError          a request's time is over
│   ├── QueueTimeoutError  waited longer than allowed
│   └── RequestTimeoutError  took longer than allowed
├── NoWorkerError          no live worker in the group
├── PolicyError            a policy broke its contract
├── SnapshotError          a state message that cannot be understood
└── UpstreamError          the engine could not be reached, or broke off
    ├── AnsweredError      it answers with an error that another engine may not have
    │   └── UnknownPathError  it does not know what it was asked for
    ├── UpstreamTimeoutError  it was silent for too long
    ├── UnreachedError     it has read nothing of the request
    │   └── DescriptorsError  since the router can open no connection
    └── RecalledError      the router broke it off
        └── EndingError    since it ends itself
"""

from __future__ import annotations


class EvenstepError(Exception):
    """Base of every error that Evenstep raises on purpose."""


class ConfigError(EvenstepError):
    """Settings that cannot be used; the message names the setting and the mend."""


class InputError(EvenstepError):
    """A file or value that cannot be used; the message names the place and the mend."""


class PlacementError(InputError):
    """Servers that cannot hold the model and one request; the message says how short they are.

    Args:
        missing_bytes: memory that they lack together, at least.
        missing_blocks: blocks that they cannot hold, each with one slot.
    """

    def __init__(self, message: str, missing_bytes: int, missing_blocks: int) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes
        self.missing_blocks = missing_blocks


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


class UnknownKeyError(EvenstepError):
    """The request came without a key, or with one that does not count."""


class KeyLimitError(EvenstepError):
    """A key may have no request more for now.

    Args:
        reached: what it has had, for the client.
        retry_after_s: how long the client should wait before it tries again.
    """

    def __init__(self, reached: str, retry_after_s: int) -> None:
        super().__init__(f"{reached}; retry later")
        self.retry_after_s = retry_after_s


class PoolFullError(EvenstepError):
    """The waiting pool has no room.

    Args:
        limit: requests that may wait.
        retry_after_s: how long the client should wait before it tries again.
    """

    _whose = ""

    def __init__(self, limit: int, retry_after_s: int) -> None:
        super().__init__(f"the waiting pool is full ({limit} requests{self._whose}); retry later")
        self.retry_after_s = retry_after_s


class DisplacedError(PoolFullError):
    """A request that waited made room for one of a key that has fewer waiting."""

    _whose = ", most of them with this key"


class DeadlineError(EvenstepError):
    """A request's time is over.

    Args:
        message: for the client.
        own: the client has set the time, so that asking again is in vain.
    """

    def __init__(self, message: str, *, own: bool = False) -> None:
        super().__init__(message)
        self.own = own


class QueueTimeoutError(DeadlineError):
    """The request waited in the pool longer than the queue timeout, or its own."""


class RequestTimeoutError(DeadlineError):
    """The request was not answered within its own time, or the router's."""


class NoWorkerError(EvenstepError):
    """No live worker serves the group."""


class PolicyError(EvenstepError):
    """A policy returned assignments that break its contract."""


class SnapshotError(EvenstepError):
    """A state message that cannot be understood."""


class UpstreamError(EvenstepError):
    """The engine could not be reached, or its answer broke off or is not HTTP."""


class AnsweredError(UpstreamError):
    """The engine answers with an error, which another one is asked instead of."""


class UnknownPathError(AnsweredError):
    """The engine does not know the path."""


class UnreachedError(UpstreamError):
    """There is no connection to the engine: it has read nothing of the request."""


class DescriptorsError(UnreachedError):
    """The router has no file descriptors left for connections; no engine is to blame."""


class UpstreamTimeoutError(UpstreamError):
    """The engine did not begin to answer in time, or fell silent."""


class RecalledError(UpstreamError):
    """The router gave up an attempt, since its worker is out of use."""


class EndingError(RecalledError):
    """The router ends, and has waited long enough for the answer."""
