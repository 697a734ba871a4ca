from __future__ import annotations

from collections.abc import Callable, Set
from typing import TYPE_CHECKING, Protocol

from starlette.types import Scope

from router.access.door import Door
from router.core.clock import Clock
from router.core.request_limits import RequestLimits
from router.http.lifecycle import Lifecycle
from router.proxy.client import Client
from router.proxy.relay_context import RelayContext

if TYPE_CHECKING:
    from router.dispatch.dispatcher import Dispatcher
    from router.dispatch.models import ModelTable


class Serves(Protocol):
    """Serves one request."""

    async def serve(self, client: Client) -> None: ...


class Models(Protocol):
    """Lookup of models, as requests need it; see ``ModelTable``."""

    def resolve(self, name: str | None) -> str | None: ...

    def group(self, model: str | None) -> str: ...

    @property
    def limits(self) -> RequestLimits: ...

    def tokens(self, group: str, text_bytes: int, parts: int) -> int: ...

    def most_slots(self, group: str) -> int | None: ...

    def prefills(self, group: str, lacks: Set[str]) -> str | None: ...

    def lacking(self, model: str | None) -> frozenset[str]: ...


class ServingContext(Protocol):
    """Dependencies of requests that generate.

    Attributes:
        door: check of keys; None: all clients may enter.
    """

    @property
    def models(self) -> Models: ...

    @property
    def relay(self) -> RelayContext: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def lifecycle(self) -> Lifecycle: ...

    @property
    def door(self) -> Door | None: ...

    @property
    def elsewhere(self) -> Callable[[Scope, bytes], Serves] | None:
        """Server for split or metered requests; None: this process serves them."""
        ...


class DecidingContext(ServingContext, Protocol):
    """Dependencies of requests in the process that decides."""

    @property
    def models(self) -> ModelTable: ...

    @property
    def dispatcher(self) -> Dispatcher: ...
