"""The dispatcher's interface for the proxy."""

from __future__ import annotations

import asyncio
from collections.abc import Set
from typing import Protocol

from router.core.stats import TokenStats
from router.core.types import Outcome, Request, WorkerSpec


class DispatchPort(Protocol):
    """Methods of the dispatcher that the proxy calls."""

    def submit(self, request: Request) -> asyncio.Future[WorkerSpec]:
        """Queue a request for a worker.

        Returns:
            The worker, once a slot is free; fails with NoWorkerError, QueueTimeoutError or
            DisplacedError.

        Raises:
            NoWorkerError: the group has had no live worker for a second.
            PoolFullError: the queue is full.
        """
        ...

    def withdraw(self, request: Request, outcome: Outcome = Outcome.ABORTED) -> None:
        """Remove a waiting or assigned request whose client has left."""
        ...

    def give_back(
        self, request: Request, *failed_by: str
    ) -> tuple[Request, asyncio.Future[WorkerSpec]]:
        """Queue a request again, before all others, after an attempt failed before its first byte.

        Workers in ``failed_by`` are avoided while the group has others.

        Returns:
            The request under its new id, and its worker as from ``submit``.
        """
        ...

    def may_ask_elsewhere(self, group: str, asked: Set[str]) -> bool:
        """Try to take a retry from the group's budget; ``asked``: workers that were tried already.

        Returns:
            False if no other worker can be asked, or the budget is spent.
        """
        ...

    def answered(self, worker_id: str, attempt: str) -> None: ...

    def failed(self, worker_id: str, attempt: str, *, suspect: bool = False) -> None:
        """Record that a worker failed a request; suspect: another worker failed it too."""
        ...

    def refused(self, worker_id: str, attempt: str) -> None:
        """Record that a worker answered with an error, whatever its cause."""
        ...

    def rest(self, worker_id: str, seconds: float) -> None:
        """Give a worker no requests for some seconds, as it asked for."""
        ...

    def end(self, request: Request, outcome: Outcome) -> None: ...

    def progress(self, request: Request, generated_tokens: int) -> None:
        """Record the number of output tokens that an assigned request has streamed so far."""
        ...

    def prompt_counted(self, request: Request, prompt_tokens: int, output_tokens: int = 0) -> None:
        """Record the numbers of prompt tokens and, if known, output tokens from an engine."""
        ...

    def token_stats(self, group: str) -> TokenStats:
        """Counters of a group's token times, which its streams update."""
        ...

    def energy_j(self, request: Request) -> float | None: ...

    def first_byte(self, request: Request, now_s: float) -> None:
        """Record the time (dispatcher's clock) at which an answer's first byte was passed on."""
        ...


class SplitPort(DispatchPort, Protocol):
    """The interface for requests with separate prefill and decode workers."""

    def turned_away(
        self, request: Request, worker_id: str
    ) -> tuple[Request, asyncio.Future[WorkerSpec]] | None:
        """Queue a prompt again, as ``give_back`` does, after a prefill worker rejected it.

        Returns:
            As from ``give_back``; None, without effect, if all others reject too or the retry
            budget is spent.
        """
        ...

    def hand_off(
        self,
        request: Request,
        prompt_tokens: int,
        kept_s: float | None,
        *,
        lost: bool = False,
    ) -> tuple[Request, asyncio.Future[WorkerSpec]]:
        """Queue a request for a decode worker after a prefill worker has computed its prompt.

        Args:
            request: the request at the prefill worker.
            prompt_tokens: number of tokens that the engine counted.
            kept_s: seconds for which the engine keeps the KV; None: no lease, or the KV is
                unreachable.
            lost: true if no worker can fetch the KV.

        Returns:
            As from ``give_back``.
        """
        ...

    def prefill_again(
        self, request: Request, *failed_by: str
    ) -> tuple[Request, asyncio.Future[WorkerSpec]]:
        """Queue a request for a prefill worker again, since its KV is gone."""
        ...

    def serve_whole(self, request: Request) -> tuple[Request, asyncio.Future[WorkerSpec]]: ...

    def keeps(self, request: Request) -> bool:
        """Report if a prefill worker still keeps the request's KV."""
        ...

    def fetched(self, request: Request) -> None:
        """Release the KV that a prefill worker kept; the decode worker has fetched it."""
        ...
