"""The dispatcher's interface for the proxy."""

from __future__ import annotations

import asyncio
from collections.abc import Set
from typing import Protocol

from router.core.stats import TokenStats
from router.core.types import (
    AnswerEvent,
    Fetched,
    Outcome,
    Progressed,
    PromptCounted,
    Request,
    WorkerSpec,
)


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

    def began(
        self, request: Request, worker_id: str, now_s: float, *, good: bool = True
    ) -> TokenStats:
        """Record that the answer's first byte goes to the client now; not ``good``: an error.

        Returns:
            Counters of the group's token times, which its streams update.
        """
        ...

    def apply(self, event: AnswerEvent | Progressed | PromptCounted) -> None:
        """Record an event of an answer."""
        ...

    def end(self, request: Request, outcome: Outcome) -> None:
        """End a request, waiting or at a worker; no-op if it has ended."""
        ...

    def energy_j(self, request: Request) -> float | None: ...


class SplitPort(DispatchPort, Protocol):
    """The interface for requests with separate prefill and decode workers."""

    def apply(self, event: AnswerEvent | Progressed | PromptCounted | Fetched) -> None: ...

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
