"""Messages between the proxies and the deciding process.

Times are of the monotonic clock, which the processes of a machine share.
"""

import msgspec

from router.core import events as ev
from router.core.errors import (
    DisplacedError,
    EvenstepError,
    KeyLimitError,
    NoWorkerError,
    PoolFullError,
    QueueTimeoutError,
    RetryLaterError,
    TargetError,
)
from router.core.targets import Verdict
from router.core.types import Request, WorkerSpec
from router.processes.directory import Directory, Pair


class Message(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Base of the messages that are no events."""


class Beat(Message, frozen=True):
    """Heartbeat of either side."""


# From a proxy to the deciding process.


class Held(msgspec.Struct, frozen=True, array_like=True):
    """A request at a worker, and its output tokens so far."""

    request: Request
    worker_id: str
    tokens: int = 0


class Hello(Message, frozen=True):
    """First message; ``held``: requests at workers."""

    slot: int
    restarts: int
    held: list[Held]


class Trouble(Message, frozen=True):
    """A worker was unreachable or broke off."""

    worker_id: str
    reason: str


class GroupTally(msgspec.Struct, array_like=True):
    """A group's new counts: ``itl``, ``tpot`` by bucket of ``TokenStats``, and their sums."""

    itl: list[int] = []
    itl_s: float = 0.0
    tpot: list[int] = []
    tpot_s: float = 0.0
    unreturned: int = 0
    verdicts: dict[Verdict, int] = {}


class Tally(Message, frozen=True):
    """A proxy's counts since the last report; ``connections``: open now.

    ``refused``: before routing, by status. ``broken``: connections that an error ended.
    """

    groups: dict[str, GroupTally]
    connections: int
    refused: dict[int, int]
    unauthorized: int
    broken: int


class Tried(Message, frozen=True):
    """Reply to ``Try``: why the certificate is unusable; empty if it is usable."""

    number: int
    refusal: str


class Followed(Message, frozen=True):
    """Reply to ``Told``: the proxy has applied this directory."""

    number: int


# From the deciding process to a proxy.


class Given(Message, frozen=True):
    """A worker for a request."""

    id: str
    worker: WorkerSpec


class Denied(Message, frozen=True):
    """No worker; ``error_of`` restores the error."""

    id: str
    kind: str
    said: str
    retry_after_s: int | None = None
    own: bool = False


class Recall(Message, frozen=True):
    """``Attempts.recall``, or with ``streams`` ``Attempts.break_off``."""

    worker_id: str
    reason: str
    streams: bool


class Try(Message, frozen=True):
    """Check a certificate without using it; the reply is ``Tried``."""

    number: int
    pair: Pair


class Told(Message, frozen=True):
    """A new directory; the reply is ``Followed``."""

    number: int
    directory: Directory


# ``Arrived`` and ``Returned`` are answered by ``Given`` or ``Denied``.
Answered = ev.Began | ev.Progressed | ev.PromptCounted | ev.Succeeded | ev.Failed | ev.Refused
FromProxy = (
    ev.Arrived
    | ev.Returned
    | Answered
    | ev.Ended
    | ev.RestRequested
    | Hello
    | Trouble
    | Tally
    | Tried
    | Followed
    | Beat
)
FromDecider = Given | Denied | Recall | Try | Told | Beat

_KINDS: dict[str, type[EvenstepError]] = {
    kind.__name__: kind
    for kind in (
        *(NoWorkerError, QueueTimeoutError),
        *(PoolFullError, DisplacedError, KeyLimitError, TargetError),
    )
}


def denied(request_id: str, error: EvenstepError) -> Denied:
    """An unexpected error class travels under its own name."""
    kind = type(error).__name__
    retry_after_s = error.retry_after_s if isinstance(error, RetryLaterError) else None
    own = isinstance(error, QueueTimeoutError) and error.own
    return Denied(request_id, kind, str(error), retry_after_s, own)


def error_of(message: Denied) -> EvenstepError:
    """The error: same class, same text."""
    kind = _KINDS.get(message.kind, EvenstepError)
    # The constructor would word the text differently.
    error = kind.__new__(kind, message.said)
    if isinstance(error, RetryLaterError):
        error.retry_after_s = message.retry_after_s
    if isinstance(error, QueueTimeoutError):
        error.own = message.own
    return error


from_proxy: msgspec.msgpack.Decoder[FromProxy] = msgspec.msgpack.Decoder(FromProxy)
from_decider: msgspec.msgpack.Decoder[FromDecider] = msgspec.msgpack.Decoder(FromDecider)
