"""Counts of the router's processes, for metrics."""

from dataclasses import dataclass, field

PROXY, DECIDER = "proxy", "decider"


@dataclass(slots=True)
class ProcessCounts:
    """Processes by role.

    Attributes:
        proxies: number of connected proxies that have reported.
        proxy_restarts: number of restarts, by the proxy's slot.
        broken: number of connections between processes that an error ended.
        wanted: configured number of proxies; 0: this is the only process.
    """

    proxies: int = 0
    proxy_restarts: dict[int, int] = field(default_factory=dict)
    decider_restarts: int = 0
    broken: int = 0
    wanted: int = 0

    def up(self) -> dict[str, int]:
        return {PROXY: self.proxies, DECIDER: 1}

    def restarts(self) -> dict[str, int]:
        return {PROXY: sum(self.proxy_restarts.values()), DECIDER: self.decider_restarts}
