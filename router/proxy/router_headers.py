"""Request headers that set how the router serves a request."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from router.core.errors import InvalidRequestError

PRIORITY = "X-Request-Priority"
REQUEST_TIMEOUT = "X-Request-Timeout-S"
QUEUE_TIMEOUT = "X-Queue-Timeout-S"
ENERGY = "X-Evenstep-Energy"
# vLLM's header; like vLLM, the router ignores one that is no number.
_ENGINE_PRIORITY = "X-Vllm-Priority"
_MOST = 2**63
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


def said(headers: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    """Headers that begin with ``x-``, by lower-case name; the first of several counts."""
    return {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in reversed(headers)
        if name.startswith(b"x-")
    }


def priority(headers: Mapping[str, str], of_body: int) -> int:
    """Priority of a request, lower first; as in vLLM, a header overrides the body's ``of_body``.

    Raises:
        InvalidRequestError: the header is not a number.
    """
    given = headers.get(PRIORITY.lower())
    if given is not None:
        wished = _whole(given)
        if wished is None:
            raise InvalidRequestError(
                f"{PRIORITY} should be a whole number; lower goes first", param=PRIORITY
            )
        return wished
    wished = _whole(headers.get(_ENGINE_PRIORITY.lower(), ""))
    return of_body if wished is None else wished


def metered(headers: Mapping[str, str]) -> bool:
    """Whether the client requests the energy of its request."""
    return headers.get(ENERGY.lower()) == "1"


def timeout_s(headers: Mapping[str, str], name: str) -> float | None:
    """Seconds in the header ``name``, None if absent.

    Raises:
        InvalidRequestError: the value is malformed.
    """
    given = headers.get(name.lower())
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
