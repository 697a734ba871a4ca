"""A client's request on its way to the engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.proxy.dialects import COMPLETIONS, Dialect
from router.request_log import RequestLine


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client has asked for, as far as it goes to an engine.

    Attributes:
        target: path and query, the same at the engine.
        body: JSON, passed on unchanged as far as its dialect allows.
        headers: the client's, its key not among them.
        client_id: what the client calls its request, empty if it does not.
        dialect: of its endpoint.
        timeout_s: within which the client wants its answer; None: it does not say.
        line: its line in the log; None: it has none.
    """

    target: str
    body: bytes
    headers: Sequence[tuple[bytes, bytes]] = ()
    client_id: str = ""
    dialect: Dialect = COMPLETIONS
    timeout_s: float | None = None
    line: RequestLine | None = None
