"""What a client says in headers of how its request is to be served."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from router.errors import InvalidRequestError

PRIORITY = "X-Request-Priority"
REQUEST_TIMEOUT = "X-Request-Timeout-S"
QUEUE_TIMEOUT = "X-Queue-Timeout-S"
ENERGY = "X-Evenstep-Energy"
# As vLLM reads it, which does not look at one that is no number.
_ENGINE_PRIORITY = "X-Vllm-Priority"
_MOST = 2**63
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


def said(headers: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    """Those headers among which wishes are, by name in small letters; of several the first."""
    return {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in reversed(headers)
        if name.startswith(b"x-")
    }


def priority(headers: Mapping[str, str], of_body: int) -> int:
    """Of a request; lower goes first. A header goes before what the body says, as in vLLM.

    Args:
        headers: see ``said``.
        of_body: what the body says.

    Raises:
        InvalidRequestError: the header is no number.
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
    """Whether the client wants to know the energy of its request."""
    return headers.get(ENERGY.lower()) == "1"


def timeout_s(headers: Mapping[str, str], name: str) -> float | None:
    """A time in seconds that a header gives, None if it is not there.

    Args:
        headers: see ``said``.
        name: of the header.

    Raises:
        InvalidRequestError: it is no time.
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
