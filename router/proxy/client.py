"""Who has asked, as far as a relay knows: somebody who takes an answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from router.proxy.answers import Answer, Header


class Source(Protocol):
    """Where an answer comes from, as far as its client knows."""

    def pause(self) -> None:
        """Take no more for now: what is there has not been taken yet."""
        ...

    def resume(self) -> None:
        """Take more."""
        ...


class Client(Protocol):
    """Takes one answer: a whole one, or one that begins, comes in pieces and is finished.

    Nothing here waits; a client that takes pieces slowly pauses their source.

    Attributes:
        gone: it takes nothing any more.
    """

    gone: bool

    def answer(self, answer: Answer) -> None:
        """Send it whole."""
        ...

    def begin(self, status: int, headers: Iterable[Header], source: Source) -> None:
        """An answer's head; it goes with the first piece. ``source``: of the pieces."""
        ...

    def send(self, piece: bytes) -> None:
        """A piece, which is not empty."""
        ...

    def finish(self, piece: bytes = b"") -> None:
        """The last piece, or none."""
        ...
