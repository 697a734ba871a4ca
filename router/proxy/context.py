"""What the routes for clients' requests need of the rest of the router."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from router.access.door import Door
from router.clock import Clock
from router.dispatch import Dispatcher
from router.lifecycle import Lifecycle
from router.models import ModelTable
from router.proxy.relay_context import RelayContext


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
    """

    dispatcher: Dispatcher
    models: ModelTable
    relay: RelayContext
    metrics: Callable[[], Awaitable[bytes]]
    clock: Clock
    problem: Callable[[str], str | None] = lambda _: None
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    door: Door | None = None
