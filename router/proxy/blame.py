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
from router.dispatch.interface import DispatchPort


def judge_answer(
    port: DispatchPort,
    worker_id: str,
    attempt: str,
    status: int,
    retry_after: bytes,
    *,
    suspect: bool,
) -> None:
    """Report an answer; ``status`` may be that of an error inside it.

    ``attempt`` is the request's id at the worker. ``suspect``: another worker failed the same
    request.
    """
    if status >= HTTPStatus.BAD_REQUEST:
        port.refused(worker_id, attempt)
    if faults(status):
        port.failed(worker_id, attempt, suspect=suspect)
    if seconds := rest_s(status, retry_after):
        port.rest(worker_id, seconds)


def judge_failure(
    port: DispatchPort,
    trouble: Callable[[str, str], None],
    worker_id: str,
    attempt: str,
    error: UpstreamError,
) -> None:
    """Report an answer that is missing or incomplete, unless the router caused the error.

    ``trouble`` is the callback for an unreachable worker.
    """
    if isinstance(error, RecalledError | AnsweredError | DescriptorsError):
        return
    port.failed(worker_id, attempt)
    if not isinstance(error, UpstreamTimeoutError):
        trouble(worker_id, str(error))
