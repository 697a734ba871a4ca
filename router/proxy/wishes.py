"""What a client says in headers of how its request is to be served."""

from __future__ import annotations

import re

from starlette.datastructures import Headers

from router.errors import InvalidRequestError

PRIORITY = "X-Request-Priority"
REQUEST_TIMEOUT = "X-Request-Timeout-S"
QUEUE_TIMEOUT = "X-Queue-Timeout-S"
# As vLLM reads it, which does not look at one that is no number.
_ENGINE_PRIORITY = "X-Vllm-Priority"
_MOST = 2**63
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


def priority(headers: Headers, of_body: int) -> int:
    """Of a request; lower goes first. A header goes before what the body says, as in vLLM.

    Raises:
        InvalidRequestError: the header is no number.
    """
    given = headers.get(PRIORITY)
    if given is not None:
        wished = _whole(given)
        if wished is None:
            raise InvalidRequestError(
                f"{PRIORITY} should be a whole number; lower goes first", param=PRIORITY
            )
        return wished
    wished = _whole(headers.get(_ENGINE_PRIORITY, ""))
    return of_body if wished is None else wished


def timeout_s(headers: Headers, name: str) -> float | None:
    """A time in seconds that a header gives, None if it is not there.

    Raises:
        InvalidRequestError: it is no time.
    """
    given = headers.get(name)
    if given is None:
        return None
    if _SECONDS.fullmatch(given.strip()) is None or not (seconds := float(given)):
        raise InvalidRequestError(
            f"{name} should be a number of seconds above 0, as in 2.5", param=name
        )
    return seconds


def _whole(text: str) -> int | None:
    digits = text.strip()
    if not digits.removeprefix("-").isdecimal() or len(digits) > 20:
        return None
    return max(-_MOST, min(int(digits), _MOST))
