"""What proxies and the deciding process tell each other, and its bytes.

A frame is a length and a message as msgpack. Requests are meant by their ids, which are unique per
attempt. Times are of the monotonic clock, which the processes of a machine share.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from router.errors import (
    DisplacedError,
    EvenstepError,
    KeyLimitError,
    NoWorkerError,
    PoolFullError,
    QueueTimeoutError,
)
from router.processes.directory import Directory, Pair
from router.types import Outcome, Request, WorkerSpec

# Longer than any frame that is ever sent: who announces one is not understood.
_MOST_BYTES = 256 * 1024 * 1024

_LENGTH_BYTES = 4


class Message(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Base of all messages."""


class Beat(Message, frozen=True):
    """A sign of life, which either side sends now and then."""


# What a proxy says.


class Held(msgspec.Struct, frozen=True, array_like=True):
    """A request that a proxy has at a worker, and the output tokens that it has shown so far."""

    request: Request
    worker_id: str
    tokens: int = 0


class Hello(Message, frozen=True):
    """The first message: which proxy it is, how often it was started anew, and what it has."""

    slot: int
    restarts: int
    held: list[Held]


class Submit(Message, frozen=True):
    """See ``DispatchPort.submit``; answered with ``Given`` or ``Denied``."""

    request: Request


class GiveBack(Message, frozen=True):
    """See ``DispatchPort.give_back``; ``again`` is answered as if it were submitted."""

    id: str
    again: Request
    failed_by: tuple[str, ...]


class Withdraw(Message, frozen=True):
    """See ``DispatchPort.withdraw``."""

    id: str
    outcome: Outcome


class End(Message, frozen=True):
    """See ``DispatchPort.end``."""

    id: str
    outcome: Outcome


class FirstByte(Message, frozen=True):
    """See ``DispatchPort.first_byte``."""

    id: str
    time_s: float


class Progress(Message, frozen=True):
    """See ``DispatchPort.progress``."""

    id: str
    generated_tokens: int


class Counted(Message, frozen=True):
    """See ``DispatchPort.prompt_counted``."""

    id: str
    prompt_tokens: int
    output_tokens: int


class Answered(Message, frozen=True):
    """See ``DispatchPort.answered``."""

    worker_id: str
    attempt: str


class Failed(Message, frozen=True):
    """See ``DispatchPort.failed``."""

    worker_id: str
    attempt: str
    suspect: bool


class Refused(Message, frozen=True):
    """See ``DispatchPort.refused``."""

    worker_id: str
    attempt: str


class Rest(Message, frozen=True):
    """See ``DispatchPort.rest``."""

    worker_id: str
    seconds: float


class Trouble(Message, frozen=True):
    """A worker could not be reached, or broke off."""

    worker_id: str
    reason: str


class GroupTally(msgspec.Struct, array_like=True):
    """What has come of a group's requests since it was told last.

    Attributes:
        itl: counts by bucket of ``TokenStats.itl_s``; ``itl_s``: their sum.
        tpot: likewise of ``TokenStats.tpot_s``.
        unreturned: see ``GroupStats``.
    """

    itl: list[int] = []
    itl_s: float = 0.0
    tpot: list[int] = []
    tpot_s: float = 0.0
    unreturned: int = 0


class Tally(Message, frozen=True):
    """What a proxy has counted.

    Attributes:
        groups: since it was told last, those with news.
        connections: that clients have open now.
        refused: requests refused as a whole since it was told last, by status.
        unauthorized: requests without a key that counts, likewise.
        broken: connections to the deciding process that an error has ended, likewise.
    """

    groups: dict[str, GroupTally]
    connections: int
    refused: dict[int, int]
    unauthorized: int
    broken: int


class Tried(Message, frozen=True):
    """Whether a certificate can be shown; empty: it can."""

    number: int
    refusal: str


class Followed(Message, frozen=True):
    """What was told under this number is what it goes by."""

    number: int


# What the deciding process says.


class Given(Message, frozen=True):
    """A request has its worker."""

    id: str
    worker: WorkerSpec


class Denied(Message, frozen=True):
    """A request gets no worker; see ``error_of``."""

    id: str
    kind: str
    said: str
    retry_after_s: int | None = None
    own: bool = False


class Recall(Message, frozen=True):
    """See ``Attempts.recall``; ``streams``: and ``Attempts.break_off``."""

    worker_id: str
    reason: str
    streams: bool


class Try(Message, frozen=True):
    """Answered with ``Tried``: could this certificate be shown? It is not shown yet."""

    number: int
    pair: Pair


class Told(Message, frozen=True):
    """What proxies go by has changed; answered with ``Followed``."""

    number: int
    directory: Directory


FromProxy = (
    Hello
    | Submit
    | GiveBack
    | Withdraw
    | End
    | FirstByte
    | Progress
    | Counted
    | Answered
    | Failed
    | Refused
    | Rest
    | Trouble
    | Tally
    | Tried
    | Followed
    | Beat
)
FromDecider = Given | Denied | Recall | Try | Told | Beat

_KINDS: dict[str, type[EvenstepError]] = {
    kind.__name__: kind
    for kind in (NoWorkerError, QueueTimeoutError, PoolFullError, DisplacedError, KeyLimitError)
}


def denied(request_id: str, error: EvenstepError) -> Denied:
    """An error of the dispatcher's as a message; one that it should not have is told as it is."""
    kind = type(error).__name__
    retry_after_s = (
        error.retry_after_s if isinstance(error, PoolFullError | KeyLimitError) else None
    )
    own = isinstance(error, QueueTimeoutError) and error.own
    return Denied(request_id, kind, str(error), retry_after_s, own)


def error_of(message: Denied) -> EvenstepError:
    """The error that a message tells of: of the same class, with the same words."""
    kind = _KINDS.get(message.kind, EvenstepError)
    # Its constructor would word it anew.
    error = kind.__new__(kind, message.said)
    if isinstance(error, PoolFullError | KeyLimitError):
        error.retry_after_s = message.retry_after_s or 1
    if isinstance(error, QueueTimeoutError):
        error.own = message.own
    return error


_encoder = msgspec.msgpack.Encoder()
from_proxy: msgspec.msgpack.Decoder[FromProxy] = msgspec.msgpack.Decoder(FromProxy)
from_decider: msgspec.msgpack.Decoder[FromDecider] = msgspec.msgpack.Decoder(FromDecider)


def append(message: Message, data: bytearray) -> None:
    """Add a frame to those that are to be sent.

    Raises:
        ValueError, OverflowError: it cannot be written, as a number of more than 64 bits, or is
            longer than any; those before it stand as they were.
    """
    begin = len(data)
    content = begin + _LENGTH_BYTES
    try:
        _encoder.encode_into(message, data, content)
        length = len(data) - content
        if length > _MOST_BYTES:
            raise ValueError(f"a message has {length:,} bytes, {_MOST_BYTES:,} at most")
    except Exception:
        del data[begin:]
        raise
    data[begin:content] = length.to_bytes(_LENGTH_BYTES, "big")


class Frames:
    """Takes a stream of bytes apart into frames, however it comes cut."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[memoryview]:
        """The frames that are complete with these bytes, without their lengths.

        Raises:
            ValueError: the bytes are no frames.
        """
        data = self._rest + data if self._rest else data
        view, at = memoryview(data), 0
        while (end := _end_of_frame(view, at)) is not None and end <= len(data):
            yield view[at + _LENGTH_BYTES : end]
            at = end
        self._rest = data[at:]


def _end_of_frame(view: memoryview, at: int) -> int | None:
    """Where the frame that begins there ends; None: its length has not come yet."""
    if len(view) - at < _LENGTH_BYTES:
        return None
    length = int.from_bytes(view[at : at + _LENGTH_BYTES], "big")
    if length > _MOST_BYTES:
        raise ValueError(f"a frame of {length} bytes")
    return at + _LENGTH_BYTES + length
