"""What the proxy may ask of the dispatcher."""

from __future__ import annotations

import asyncio
from collections.abc import Set
from typing import Protocol

from router.stats import TokenStats
from router.types import Outcome, Request, WorkerSpec


class DispatchPort(Protocol):
    """The dispatcher, as far as the proxy knows it."""

    def submit(self, request: Request) -> asyncio.Future[WorkerSpec]:
        """Let a request wait for a worker.

        Returns:
            The worker, once a slot is free. Its exceptions: NoWorkerError, QueueTimeoutError.

        Raises:
            NoWorkerError: nobody has served the group for a second.
            PoolFullError: no room to wait.
        """
        ...

    def withdraw(self, request: Request, outcome: Outcome = Outcome.ABORTED) -> None:
        """Nobody waits for the answer any more; the request may be waiting or assigned."""
        ...

    def give_back(
        self, request: Request, *failed_by: str
    ) -> tuple[Request, asyncio.Future[WorkerSpec]]:
        """An attempt failed before the first byte: wait for another worker, before all others.

        Args:
            request: as it was called.
            failed_by: the worker, if it is one to avoid; others are waited for while there are any.

        Returns:
            The request as it is called from now on, and its worker as ``submit`` returns it.
        """
        ...

    def may_ask_elsewhere(self, group: str, asked: Set[str]) -> bool:
        """Whether an answer of these workers may be asked of another one instead.

        False if the group has no other, or the budget of retries is spent; else one is taken of it.
        """
        ...

    def answered(self, worker_id: str, attempt: str) -> None:
        """A worker has begun to answer a request, and not with an error."""
        ...

    def failed(self, worker_id: str, attempt: str, *, suspect: bool = False) -> None:
        """A worker has failed a request; suspect: which another has failed, too."""
        ...

    def refused(self, worker_id: str, attempt: str) -> None:
        """A worker has answered a request with an error, whoever is to blame."""
        ...

    def rest(self, worker_id: str, seconds: float) -> None:
        """A worker asks to be given nothing for so long."""
        ...

    def end(self, request: Request, outcome: Outcome) -> None:
        """An assigned request has ended."""
        ...

    def progress(self, request: Request, generated_tokens: int) -> None:
        """An assigned request's stream has shown so many output tokens."""
        ...

    def prompt_counted(self, request: Request, prompt_tokens: int, output_tokens: int = 0) -> None:
        """An engine has said how many tokens a request's prompt has, and perhaps its output."""
        ...

    def token_stats(self, group: str) -> TokenStats:
        """Where streams of a group count the times of their tokens."""
        ...

    def energy_j(self, request: Request) -> float | None:
        """Joules that a metered request has used so far where it is; None: not known."""
        ...

    def first_byte(self, request: Request, now_s: float) -> None:
        """The first byte of an answer was passed on, at a time of the dispatcher's clock."""
        ...


class SplitPort(DispatchPort, Protocol):
    """The same for requests whose prompts are computed apart."""

    def turned_away(
        self, request: Request, worker_id: str
    ) -> tuple[Request, asyncio.Future[WorkerSpec]] | None:
        """A prefill worker takes no prompt now: wait for another, as after ``give_back``.

        Returns:
            As ``give_back`` does; None, and nothing is changed, if all others took none either, or
            the budget of retries is spent.
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
        """A prefill worker has computed the prompt: wait for a worker to decode.

        Args:
            request: as it was at the prefill worker.
            prompt_tokens: as its engine has counted them.
            kept_s: how long its engine keeps the KV, None if others can have it anyway, or nobody.
            lost: nobody can have it.

        Returns:
            As ``give_back`` does.
        """
        ...

    def prefill_again(
        self, request: Request, *failed_by: str
    ) -> tuple[Request, asyncio.Future[WorkerSpec]]:
        """The KV of a request that was handed off is gone: wait for a prefill worker anew."""
        ...

    def serve_whole(self, request: Request) -> tuple[Request, asyncio.Future[WorkerSpec]]:
        """No prefill worker can be had: wait for another that does both."""
        ...

    def keeps(self, request: Request) -> bool:
        """Whether a prefill worker still keeps the KV of a request that was handed off."""
        ...

    def fetched(self, request: Request) -> None:
        """A worker that answers has the KV of a request that was handed off, if it was kept."""
        ...
