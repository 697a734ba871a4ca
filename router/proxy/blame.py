"""Report to the dispatcher what an attempt's result means for its worker.

A client's mistakes (4xx) and a busy worker (429, 408) are not faults. The latency of an error is no
measure of a worker's speed.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus

from router.core.errors import (
    AnsweredError,
    DescriptorsError,
    RecalledError,
    UpstreamError,
    UpstreamTimeoutError,
)
from router.core.queue.retry import faults, rest_s
from router.core.types import Failed, Refused, RestRequested
from router.dispatch.interface import DispatchPort


def judge_answer(
    port: DispatchPort,
    worker_id: str,
    attempt: str,
    status: int,
    retry_after: bytes,
    now_s: float,
    *,
    suspect: bool,
) -> None:
    """Report an answer; ``status`` may be that of an error inside it.

    ``attempt`` is the request's id at the worker. ``suspect``: another worker failed the same
    request.
    """
    if status >= HTTPStatus.BAD_REQUEST:
        port.apply(Refused(attempt, worker_id))
    if faults(status):
        port.apply(Failed(attempt, worker_id, now_s, suspect))
    if seconds := rest_s(status, retry_after):
        port.apply(RestRequested(worker_id, now_s, seconds))


def judge_failure(
    port: DispatchPort,
    trouble: Callable[[str, str], None],
    worker_id: str,
    attempt: str,
    error: UpstreamError,
    now_s: float,
) -> None:
    """Report an answer that is missing or incomplete, unless the router caused the error.

    ``trouble`` is the callback for an unreachable worker.
    """
    if isinstance(error, RecalledError | AnsweredError | DescriptorsError):
        return
    port.apply(Failed(attempt, worker_id, now_s))
    if not isinstance(error, UpstreamTimeoutError):
        trouble(worker_id, str(error))
