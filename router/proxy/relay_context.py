from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field
from urllib.parse import quote

from router.core.clock import Clock
from router.core.queue.deadlines import Deadlines
from router.dispatch.interface import DispatchPort, SplitPort
from router.engines.client import HttpClient
from router.proxy.answers import Header
from router.proxy.attempts import Attempts
from router.proxy.mooncake import Bootstraps
from router.proxy.request_log import RequestLine

# Characters of a worker's id that a header keeps; others are quoted as in a URL.
_PLAIN = " !\"#$&'()*+,/:;<=>?@[\\]^`{|}"


@dataclass(frozen=True, slots=True)
class KvTransfer:
    """Transfer of prompts' KV from prefill to decode workers.

    Attributes:
        kept_s: lease on KV handed over by address; None: KV is found by content, no address is
            exchanged.
        bootstraps: locations that engines do not report.
        warned: workers already warned about missing locations.
    """

    port: SplitPort
    kept_s: float | None
    bootstraps: Bootstraps
    warned: set[str] = field(default_factory=set)


@dataclass(slots=True)
class RelayContext:
    """State that all relays share; limits may change, for new requests.

    Attributes:
        trouble: callback with worker id and reason, when a connection fails.
        ranked: URLs behind which a header selects the rank.
        max_attempts: attempts per request before the first byte.
        transfer: KV transfer, None without prefill workers.
        tells: whether answers name their worker and their wait in the pool.
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
        if not self.tells:
            return []
        headers = [(b"x-evenstep-worker", quote(worker_id, safe=_PLAIN).encode())]
        if line is not None and line.pool_s is not None:
            headers.append((b"x-evenstep-pool-wait-s", b"%.6f" % line.pool_s))
        return headers
