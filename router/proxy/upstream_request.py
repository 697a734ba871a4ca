from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.proxy.dialects import COMPLETIONS, Dialect
from router.proxy.request_log import RequestLine


@dataclass(frozen=True, slots=True)
class Asked:
    """A client's request in the form that engines receive.

    Attributes:
        target: path and query.
        body: JSON, unchanged unless the dialect adds a field.
        headers: client's headers without its key.
        client_id: client's request id, empty if absent.
        timeout_s: client's limit on the answer, None if absent.
    """

    target: str
    body: bytes
    headers: Sequence[tuple[bytes, bytes]] = ()
    client_id: str = ""
    dialect: Dialect = COMPLETIONS
    timeout_s: float | None = None
    line: RequestLine | None = None
