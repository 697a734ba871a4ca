"""The error tree; only ``app.py`` and ``proxy/`` assign HTTP codes."""


class EvenstepError(Exception):
    """Base of every error that Evenstep raises on purpose."""


class ConfigError(EvenstepError):
    """Unusable settings; the message names the setting and the remedy."""


class InputError(EvenstepError):
    """An unusable file or value; the message names the place and the remedy."""


class PlacementError(InputError):
    """Servers cannot hold the model and one request; the message names the shortage.

    Args:
        missing_bytes: least memory that they lack together.
        missing_blocks: number of blocks that they cannot hold, each with one slot.
    """

    def __init__(self, message: str, missing_bytes: int, missing_blocks: int) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes
        self.missing_blocks = missing_blocks


class RequestError(EvenstepError):
    """A request that cannot be served as it stands; ``param``: offending field, if any."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequestError(RequestError):
    """Not JSON, or not of the shape of a completion request."""


class NotServedError(RequestError):
    """Neither the router nor, through it, an engine serves this path with this method."""


class TooLargeError(RequestError):
    """Its body is too large."""


class UnknownModelError(RequestError):
    """No group serves the model."""


class UnknownKeyError(EvenstepError):
    """The request has no key, or an invalid one."""


class RetryLaterError(EvenstepError):
    """The request is refused; ``why`` is for the client; ``retry_after_s`` None: for good."""

    def __init__(self, why: str, retry_after_s: int | None) -> None:
        super().__init__(f"{why}; {'no retry helps' if retry_after_s is None else 'retry later'}")
        self.retry_after_s = retry_after_s


class KeyLimitError(RetryLaterError):
    """A key has reached a limit."""


class TargetError(RetryLaterError):
    """The request's first token cannot come in time."""


class PoolFullError(RetryLaterError):
    """The waiting pool is full."""

    _whose = ""

    def __init__(self, limit: int, retry_after_s: int) -> None:
        super().__init__(f"the waiting pool is full ({limit} requests{self._whose})", retry_after_s)


class DisplacedError(PoolFullError):
    """A waiting request was evicted for one of a key that has fewer waiting."""

    _whose = ", most of them with this key"


class DeadlineError(EvenstepError):
    """A request's time is over; ``own``: the client set it, so a retry is in vain."""

    def __init__(self, message: str, *, own: bool = False) -> None:
        super().__init__(message)
        self.own = own


class QueueTimeoutError(DeadlineError):
    """The wait exceeded the queue timeout, the request's own or the router's."""


class RequestTimeoutError(DeadlineError):
    """The request exceeded its own timeout or the router's."""


class NoWorkerError(EvenstepError):
    """No live worker serves the group."""


class NotLeadingError(NoWorkerError):
    """Another replica decides, or none, or this one ends; no engine has the request."""


class PolicyError(EvenstepError):
    """A policy returned assignments that break its contract."""


class SnapshotError(EvenstepError):
    """A malformed state message."""


class UpstreamError(EvenstepError):
    """The engine is unreachable, or its answer broke off or is not HTTP."""


class AnsweredError(UpstreamError):
    """The engine answered with an error; another engine is tried."""


class UnknownPathError(AnsweredError):
    """The engine does not know the path."""


class UnreachedError(UpstreamError):
    """No connection to the engine: it has read nothing of the request."""


class DescriptorsError(UnreachedError):
    """The router has no file descriptors left; no engine is at fault."""


class UpstreamTimeoutError(UpstreamError):
    """The engine did not begin to answer in time, or became silent."""


class RecalledError(UpstreamError):
    """The router ended an attempt, since its worker is out of use."""


class EndingError(RecalledError):
    """The router shuts down, and has waited long enough for the answer."""
