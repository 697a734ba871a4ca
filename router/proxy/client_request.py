"""A client's request, read once: its names, what its headers ask of the router, and its body.

The router's own token identifies it to engines: clients repeat and forge ids.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from starlette.types import Scope

from router.core.errors import InvalidRequestError
from router.core.targets import Targets
from router.proxy.dialects import Dialect
from router.proxy.request_log import RequestLine

if TYPE_CHECKING:
    from router.proxy.context import Serves

# Every answer carries it: the client's id if valid, else the router's token.
HEADER = b"x-request-id"
PRIORITY = "X-Request-Priority"
REQUEST_TIMEOUT = "X-Request-Timeout-S"
QUEUE_TIMEOUT = "X-Queue-Timeout-S"
RANK = "X-Data-Parallel-Rank"
TTFT, TPOT = "X-SLO-TTFT-Ms", "X-SLO-TPOT-Ms"
# llm-d's names for the same.
_ALSO = {TTFT: "X-LLM-D-SLO-TTFT-Ms", TPOT: "X-LLM-D-SLO-TPOT-Ms"}
_SESSION = b"x-session-id"
_ENERGY = b"x-evenstep-energy"
# vLLM's; ignored if it is no number, as there.
_ENGINE_PRIORITY = b"x-vllm-priority"
_READ = frozenset(
    {HEADER, _ENERGY, _ENGINE_PRIORITY, _SESSION}
    | {name.lower().encode() for name in (PRIORITY, REQUEST_TIMEOUT, QUEUE_TIMEOUT, RANK)}
    | {name.lower().encode() for name in (*_ALSO, *_ALSO.values())}
)
_NUMBER = re.compile(r"[0-9]{1,20}(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,2})?")  # as in JSON
_BELOW = 1e9
_SANE = re.compile(rb"[A-Za-z0-9._~-]{1,128}")

_HEAD = "evenstep.head"


class RequestHead:
    """What a request's headers say to the router."""

    __slots__ = ("_asked", "client_id", "metered", "name", "session", "token")

    def __init__(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        asked: dict[bytes, bytes] = {}  # the first of several counts
        ids = 0
        for name, value in headers:
            if name in _READ:
                asked.setdefault(name, value)
                ids += name == HEADER
        sane = ids == 1 and _SANE.fullmatch(asked[HEADER]) is not None
        # Router's unique name for it, ``es-`` and 20 hexadecimal digits that nobody can guess: who
        # knows it may end it.
        self.token = f"es-{os.urandom(10).hex()}"
        # Empty if absent, malformed or repeated.
        self.client_id = asked[HEADER].decode() if sane else ""
        # The client's id, else the token.
        self.name = self.client_id or self.token
        # The client asks for the energy.
        self.metered = asked.get(_ENERGY) == b"1"
        # The client's name for its session; empty if absent.
        self.session = asked.get(_SESSION, b"").strip()
        self._asked = asked

    @property
    def header(self) -> tuple[bytes, bytes]:
        return HEADER, self.name.encode()

    def priority(self, of_body: int) -> int:
        """Lower first; as in vLLM, a header overrides the body."""
        given = self._asked.get(PRIORITY.lower().encode())
        if given is not None:
            wished = _whole(given)
            if wished is None:
                raise InvalidRequestError(
                    f"{PRIORITY} should be a whole number; lower goes first", param=PRIORITY
                )
            return wished
        given = self._asked.get(_ENGINE_PRIORITY)
        wished = None if given is None else _whole(given)
        return of_body if wished is None else wished

    def rank(self) -> int | None:
        """Rank that the client asks for; InvalidRequestError if it is no whole number."""
        given = self._asked.get(RANK.lower().encode())
        if given is None:
            return None
        rank = _whole(given)
        if rank is None:
            raise InvalidRequestError(f"{RANK} should be a whole number", param=RANK)
        return rank

    def timeout_s(self, name: str) -> float | None:
        """None if the header is absent; InvalidRequestError if its value is malformed."""
        return self._number(name, "seconds above 0, as in 2.5")

    def targets(self, of_key: Targets | None) -> Targets | None:
        """The headers' before the key's; InvalidRequestError: malformed, or two that differ."""
        ttft_s, tpot_s = self._target_s(TTFT), self._target_s(TPOT)
        if ttft_s is None and tpot_s is None:
            return of_key
        if of_key is not None:
            ttft_s, tpot_s = ttft_s or of_key.ttft_s, tpot_s or of_key.tpot_s
        return Targets(ttft_s, tpot_s)

    def _target_s(self, name: str) -> float | None:
        wished = {
            self._number(one, "milliseconds above 0, as in 500") for one in (name, _ALSO[name])
        }
        if len(wished := wished - {None}) > 1:
            raise InvalidRequestError(f"{name} and {_ALSO[name]} differ: send one", param=name)
        return next((number / 1000 for number in wished if number is not None), None)

    def _number(self, name: str, of_what: str) -> float | None:
        value = self._asked.get(name.lower().encode())
        if value is None:
            return None
        given = value.decode("latin-1")
        number = float(given) if _NUMBER.fullmatch(given.strip()) else 0.0
        if not 0 < number < _BELOW:
            raise InvalidRequestError(f"{name} should be a number of {of_what}", param=name)
        return number


def head_of(scope: Scope) -> RequestHead:
    """Read at the first call."""
    head: RequestHead | None = scope.get(_HEAD)
    if head is None:
        head = scope[_HEAD] = RequestHead(scope["headers"])
    return head


def _whole(value: bytes) -> int | None:
    digits = value.decode("latin-1").strip()
    if not digits.removeprefix("-").isdecimal() or len(digits) > 20:
        return None
    return int(digits)


@dataclass(slots=True)
class ClientRequest:
    """A client's request as engines receive it.

    ``target``: path and query, the query byte for byte. ``body``: unchanged unless a model's alias
    is replaced. ``headers``: without the client's key. ``timeout_s``: client's limit on the answer.
    ``prefills``: group of workers that may compute its prompt.
    ``elsewhere``: has another replica serve it.
    """

    head: RequestHead
    target: str
    body: bytes
    headers: Sequence[tuple[bytes, bytes]]
    dialect: Dialect
    timeout_s: float | None = None
    prefills: str | None = None
    line: RequestLine | None = None
    elsewhere: Callable[[], Serves] | None = None

    @classmethod
    def read(cls, scope: Scope, body: bytes, dialect: Dialect) -> Self:
        head, path = head_of(scope), scope["path"]
        query = scope["query_string"]
        target = f"{path}?{query.decode('latin-1')}" if query else path
        timeout_s = head.timeout_s(REQUEST_TIMEOUT)
        return cls(head, target, body, scope["headers"], dialect, timeout_s)
