from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Protocol
from urllib.parse import quote

from router.access.door import Door
from router.core.clock import Clock
from router.core.errors import (
    AnsweredError,
    DescriptorsError,
    RecalledError,
    UpstreamError,
    UpstreamTimeoutError,
)
from router.core.events import Failed, Refused, RestRequested
from router.core.queue.retry import Deadlines, faults, rest_s
from router.core.types import Request
from router.dispatch.interface import DispatchPort
from router.engines.http_client import HttpClient
from router.http.port import Lifecycle
from router.proxy.answers import Answer, Header
from router.proxy.attempts import Attempts
from router.proxy.kv_transfer import KvTransfer
from router.proxy.request_log import RequestLine
from router.replicas.leading import Leading

if TYPE_CHECKING:
    from router.dispatch.dispatcher import Dispatcher
    from router.dispatch.models import ModelTable

# Characters of a worker's id that a header keeps; others are quoted as in a URL.
_PLAIN = " !\"#$&'()*+,/:;<=>?@[\\]^`{|}"


class Source(Protocol):
    """Source of an answer."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class Client(Protocol):
    """Receives one answer: whole, or as head, chunks and end; no method blocks."""

    gone: bool

    def answer(self, answer: Answer) -> None: ...

    # The head goes out with the first chunk.
    def begin(self, status: int, headers: Iterable[Header], source: Source) -> None: ...

    def send(self, piece: bytes) -> None: ...

    def finish(self, piece: bytes = b"") -> None: ...


class Serves(Protocol):
    """Serves one request."""

    async def serve(self, client: Client) -> None: ...


@dataclass(frozen=True, slots=True)
class RelaySettings:
    """As ``router.config`` declares them."""

    max_attempts: int
    deadlines: Deadlines
    worker_headers: bool
    client_ranks: bool = False


@dataclass(slots=True)
class RelayContext:
    """State that all relays share."""

    port: DispatchPort
    client: HttpClient
    trouble: Callable[[str, str], None]  # called with worker id and reason when a connection fails
    ranked: Container[str]  # URLs behind which a header selects the rank
    settings: RelaySettings
    clock: Clock
    transfer: KvTransfer
    attempts: Attempts = field(default_factory=Attempts)
    replicas: HttpClient = field(default_factory=HttpClient)
    leading: Leading = field(default_factory=Leading)

    def told(self, worker_id: str, line: RequestLine | None) -> list[Header]:
        headers = [(b"x-evenstep-worker", quote(worker_id, safe=_PLAIN).encode())]
        if line is not None and line.pool_s is not None:
            headers.append((b"x-evenstep-pool-wait-s", b"%.6f" % line.pool_s))
        return headers

    def judge_answer(
        self, request: Request, worker_id: str, status: int, retry_after: bytes = b""
    ) -> None:
        """Report a worker's answer; ``status`` may be that of an error inside it.

        A client's mistakes (4xx) and a busy worker (429, 408) are not faults.
        """
        now_s, suspect = self.clock(), bool(request.avoid)  # another worker has failed it, too
        if status >= HTTPStatus.BAD_REQUEST:
            self.port.apply(Refused(request.id, worker_id))
        if faults(status):
            self.port.apply(Failed(request.id, worker_id, now_s, suspect))
        if seconds := rest_s(status, retry_after):
            self.port.apply(RestRequested(worker_id, now_s, seconds))

    def judge_failure(self, request: Request, worker_id: str, error: UpstreamError) -> None:
        """Report a missing or incomplete answer, unless the router caused the error."""
        if isinstance(error, RecalledError | AnsweredError | DescriptorsError):
            return
        self.port.apply(Failed(request.id, worker_id, self.clock()))
        if not isinstance(error, UpstreamTimeoutError):
            self.trouble(worker_id, str(error))


class ServingContext(Protocol):
    """What serving a request takes; without a door all clients may enter."""

    models: ModelTable
    dispatcher: Dispatcher
    relay: RelayContext
    lifecycle: Lifecycle
    door: Door | None

    def clock(self) -> float: ...
