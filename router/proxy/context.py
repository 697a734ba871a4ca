"""What the routes for clients' requests need of the rest of the router."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from starlette.types import Scope

from router.access.door import Door
from router.clock import Clock
from router.lifecycle import Lifecycle
from router.processes.counts import ProcessCounts
from router.proxy.client import Client
from router.proxy.parse import RequestLimits
from router.proxy.relay_context import RelayContext

if TYPE_CHECKING:
    from router.dispatch import Dispatcher
    from router.models import ModelTable


class Serves(Protocol):
    """What serves one request."""

    async def serve(self, client: Client) -> None:
        """See ``Relay.serve``."""
        ...


class Models(Protocol):
    """Who serves which model, as far as requests have to know."""

    def resolve(self, name: str | None) -> str | None:
        """See ``ModelTable``."""
        ...

    def group(self, model: str | None) -> str:
        """See ``ModelTable``."""
        ...

    @property
    def limits(self) -> RequestLimits:
        """Of each request."""
        ...

    def tokens(self, group: str, text_bytes: int, parts: int) -> int:
        """See ``ModelTable``."""
        ...

    def most_slots(self, group: str) -> int | None:
        """See ``ModelTable``."""
        ...

    def prefills(self, group: str, lacks: Set[str]) -> str | None:
        """See ``ModelTable``."""
        ...

    def lacking(self, model: str | None) -> frozenset[str]:
        """See ``ModelTable``."""
        ...


class ServingContext(Protocol):
    """What requests that generate need."""

    @property
    def models(self) -> Models:
        """Who serves which model."""
        ...

    @property
    def relay(self) -> RelayContext:
        """Shared by all relays."""
        ...

    @property
    def clock(self) -> Clock:
        """The dispatcher's."""
        ...

    @property
    def lifecycle(self) -> Lifecycle:
        """How far from its end the router is."""
        ...

    @property
    def door(self) -> Door | None:
        """Lets in who may ask; None: all may."""
        ...

    @property
    def elsewhere(self) -> Callable[[Scope, bytes], Serves] | None:
        """What serves requests that are split or metered; None: they are served here."""
        ...


@dataclass(frozen=True, slots=True)
class AppContext:
    """What the routes need.

    Attributes:
        dispatcher: pools and cluster.
        models: which group serves which model.
        relay: shared by all relays.
        metrics: renders the Prometheus text.
        clock: the dispatcher's.
        problem: why a worker's snapshots do not count, None as far as all is well.
        lifecycle: how far from its end the router is.
        door: lets in who may ask; None: all may.
        processes: of the router; None: this is the only one.
        elsewhere: nothing is served anywhere else.
    """

    dispatcher: Dispatcher
    models: ModelTable
    relay: RelayContext
    metrics: Callable[[], Awaitable[bytes]]
    clock: Clock
    problem: Callable[[str], str | None] = lambda _: None
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    door: Door | None = None
    processes: ProcessCounts | None = None
    elsewhere: None = None
