"""What all relays share."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field
from urllib.parse import quote

from router.clock import Clock
from router.deadlines import Deadlines
from router.engines.upstream import HttpClient
from router.port import DispatchPort, SplitPort
from router.proxy.answers import Header
from router.proxy.attempts import Attempts
from router.proxy.mooncake import Bootstraps
from router.request_log import RequestLine

# Of a worker's id, as they are; what no header can hold is quoted as in a URL.
_PLAIN = " !\"#$&'()*+,/:;<=>?@[\\]^`{|}"


@dataclass(frozen=True, slots=True)
class KvTransfer:
    """How prompts' KV gets from the workers that compute them to those that decode.

    Attributes:
        port: the dispatcher, for requests that are split.
        kept_s: how long an engine keeps it for whom it tells where it lies; None: it tells nobody,
            and others find it by its content.
        bootstraps: who knows it instead of the engine.
        warned: workers that should have told and did not.
    """

    port: SplitPort
    kept_s: float | None
    bootstraps: Bootstraps
    warned: set[str] = field(default_factory=set)


@dataclass(slots=True)
class RelayContext:
    """What every relay needs; how often and for how long it tries may change, for new requests.

    Attributes:
        port: the dispatcher.
        client: connections to the engines.
        trouble: told of a worker that could not be reached or broke off, and why.
        ranked: URLs behind which several ranks are told apart by a header.
        max_attempts: of one request, before the first byte of an answer.
        clock: the dispatcher's.
        attempts: those under way.
        deadlines: of every request.
        transfer: how KV is handed off, None where there are no prefill workers.
        tells: answers say which worker they are from, and how long their requests waited.
    """

    port: DispatchPort
    client: HttpClient
    trouble: Callable[[str, str], None]
    ranked: Container[str]
    max_attempts: int
    clock: Clock
    attempts: Attempts = field(default_factory=Attempts)
    deadlines: Deadlines = field(default_factory=Deadlines)
    transfer: KvTransfer | None = None
    tells: bool = False

    def told(self, worker_id: str, line: RequestLine | None) -> list[Header]:
        """What an answer says beside what its engine does."""
        if not self.tells:
            return []
        headers = [(b"x-evenstep-worker", quote(worker_id, safe=_PLAIN).encode())]
        if line is not None and line.pool_s is not None:
            headers.append((b"x-evenstep-pool-wait-s", b"%.6f" % line.pool_s))
        return headers
