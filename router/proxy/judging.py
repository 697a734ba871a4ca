"""What becomes of an attempt says something of its worker: the dispatcher is told.

A client's own mistakes (4xx) say nothing, and no more does a worker that is busy (429, 408); nor
does the time that any error took say how fast a worker is.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus

from router.errors import (
    AnsweredError,
    DescriptorsError,
    RecalledError,
    UpstreamError,
    UpstreamTimeoutError,
)
from router.port import DispatchPort
from router.retry import faults, rest_s


def judge_answer(
    port: DispatchPort,
    worker_id: str,
    attempt: str,
    status: int,
    retry_after: bytes,
    *,
    suspect: bool,
) -> None:
    """A worker has answered.

    Args:
        port: the dispatcher.
        worker_id: whose answer it is.
        attempt: the request's id there.
        status: of the answer, or of the error in it.
        retry_after: the header, empty if there is none.
        suspect: another worker has failed the same request.
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
    """A worker has not answered, or not to the end.

    Args:
        port: the dispatcher.
        trouble: told of a worker that cannot be reached.
        worker_id: whose answer was waited for.
        attempt: the request's id there.
        error: what came instead; nothing is to be said of what the router itself broke off, or
            lacks.
    """
    if isinstance(error, RecalledError | AnsweredError | DescriptorsError):
        return
    port.failed(worker_id, attempt)
    if not isinstance(error, UpstreamTimeoutError):
        trouble(worker_id, str(error))
