"""Observer of requests, for the log and recordings."""

from typing import NamedTuple, Protocol

from router.core.types import Outcome, Request


class Served(NamedTuple):
    """A request's counts at its last worker."""

    worker_id: str
    prompt_tokens: int
    output_tokens: int


class RequestWatcher(Protocol):
    """Observer of the stages of requests."""

    def dispatched(self, request: Request) -> None: ...

    def first_byte(self, request: Request, time_s: float) -> None: ...

    def ended(self, request: Request, served: Served | None, outcome: Outcome) -> None:
        """The request ends; ``served`` None: it was at no worker."""
