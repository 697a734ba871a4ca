from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from router.proxy.answers import Answer, Header


class Source(Protocol):
    """Source of an answer's chunks."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class Client(Protocol):
    """A relay's view of its client, which receives one answer: whole, or as head, chunks and end.

    No method blocks; a client that reads slowly pauses the source.
    """

    gone: bool

    def answer(self, answer: Answer) -> None: ...

    # The head goes out with the first chunk.
    def begin(self, status: int, headers: Iterable[Header], source: Source) -> None: ...

    def send(self, piece: bytes) -> None: ...

    def finish(self, piece: bytes = b"") -> None: ...
