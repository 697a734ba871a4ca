"""What all relays share."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field

from router.clock import Clock
from router.deadlines import Deadlines
from router.engines.upstream import HttpClient
from router.port import DispatchPort, SplitPort
from router.proxy.attempts import Attempts
from router.proxy.mooncake import Bootstraps


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
        max_attempts: workers that one request is tried on.
        clock: the dispatcher's.
        attempts: those under way.
        deadlines: of every request.
        transfer: how KV is handed off, None where there are no prefill workers.
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
