"""The router's processes, as far as metrics tell of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

PROXY, DECIDER = "proxy", "decider"


@dataclass(slots=True)
class ProcessCounts:
    """Processes by role.

    Attributes:
        proxies: those that are connected and say so.
        proxy_restarts: how often each has been started anew, by its slot.
        decider_restarts: the same of the deciding process.
        broken: connections between processes that an error has ended.
        wanted: proxies that there are to be; 0: this is the only process.
    """

    proxies: int = 0
    proxy_restarts: dict[int, int] = field(default_factory=dict)
    decider_restarts: int = 0
    broken: int = 0
    wanted: int = 0

    def up(self) -> Iterator[tuple[tuple[str], int]]:
        """How many run."""
        yield (PROXY,), self.proxies
        yield (DECIDER,), 1

    def restarts(self) -> Iterator[tuple[tuple[str], int]]:
        """How often they have been started anew."""
        yield (PROXY,), sum(self.proxy_restarts.values())
        yield (DECIDER,), self.decider_restarts
