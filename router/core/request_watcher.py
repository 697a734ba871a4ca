"""Observer of requests, for the log and recordings."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from router.core.types import Outcome, Request

if TYPE_CHECKING:
    from router.core.state.group import Group


class Served(NamedTuple):
    """A request's counts at its last worker."""

    worker_id: str
    prompt_tokens: int
    output_tokens: int


class Watcher(Protocol):
    """Observer of the stages of requests, and of new workers."""

    def dispatched(self, request: Request) -> None: ...

    def first_byte(self, request: Request, time_s: float) -> None: ...

    def ended(self, request: Request, served: Served | None, outcome: Outcome) -> None:
        """The request ends; ``served`` None: it was at no worker."""

    def joined(self, group: Group) -> None: ...
